"""The sections of `benchmarks.on_gpu`, each in a process of its own: `python -m benchmarks.gpu_sections NAME [--tiny]`.

A section prints a JSON line for each result, when it has it. Those with an aim become figures.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from benchmarks.daemons import Daemon, Daemons, daemons, status, wait_until
from benchmarks.record import ROOT
from benchmarks.tasks import GptOptions, gpt
from p2pnode.training.settings import TrainingSettings
from p2pnode.training.supervisor.gpu_monitor import GpuMonitor
from p2pnode.training.tasks.task import read_options
from p2pnode.training.trainer.lazy_dynamo import import_later
from p2pnode.training.trainer.loading import build_task
from p2pnode.training.trainer.model.unshared_tensors import checksum
from p2pnode.training.trainer.model.vector import ModelVector
from p2pnode.training.trainer.pinned import CopyPool, register
from p2pnode.training.trainer.runner import TaskRunner
from p2pnode.training.trainer.state.state_writer import StateWriter
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.interface import StepOrder, Vector
from p2pnode.training.trainer_link.shared_memory import SharedVectors

TASK = "benchmarks.tasks:Gpt"
#: Options of `benchmarks.tasks:Gpt`: 64 k words in an optimiser step.
SMALL = {"layers": 12, "width": 768, "heads": 12, "batch_size": 32, "accumulate": 2}
LARGE = {"layers": 24, "width": 2048, "heads": 16, "batch_size": 8, "accumulate": 8}
TINY = {"layers": 1, "width": 32, "heads": 2, "context": 16, "vocabulary": 64, "batch_size": 4, "accumulate": 2}
#: Turns of ten optimiser steps, as gpu.md's aims have them.
LOCAL_STEPS = 10


class Place:
    """Where a section runs, and how large."""

    def __init__(self, *, tiny: bool) -> None:
        self.tiny = tiny
        self.device = torch.device("cpu" if tiny else "cuda:0")
        self.models = {"tiny": TINY} if tiny else {"124 M": SMALL, "1.3 B": LARGE}

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if not self.tiny:
            torch.cuda.synchronize(self.device)

    def seconds(self, do: Callable[[], object]) -> float:
        """How long it takes, until the device has done it."""
        self.wait()
        began_s = time.perf_counter()
        do()
        self.wait()
        return time.perf_counter() - began_s


def say(name: str, value: float = 0.0, unit: str = "", aim: str | None = None, **details: Any) -> None:
    """One result. With an `aim`, which may be empty, it is a figure."""
    line = {"name": name, "value": round(value, 4), "unit": unit} | ({} if aim is None else {"aim": aim}) | details
    print(json.dumps(line), flush=True)


# --- facts and copies ---------------------------------------------------------------------------------------------


def facts(place: Place) -> None:
    """The machine, and what a start costs."""
    began_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    imported_s = time.perf_counter() - began_s
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cores": os.cpu_count(),
        "locked_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    }
    if not place.tiny:
        properties = torch.cuda.get_device_properties(place.device)
        found |= {"gpu": properties.name, "memory_bytes": properties.total_memory}
        with contextlib.suppress(Exception):
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
            found |= {
                "driver": nvml.nvmlSystemGetDriverVersion(),
                "pcie": [nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle), nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)],
            }
    say("import of torch", imported_s, "s", **found)
    if not place.tiny:
        import_later()
        compiled = torch.compile(nn.Linear(8, 8).to(place.device))
        say(
            "first call of a compiled layer",
            place.seconds(lambda: compiled(torch.ones(1, 8, device=place.device))),
            "s",
        )


def copies(place: Place) -> None:
    """Both ways between the shared vectors and the device, before and after they are registered."""
    for gigabytes in (0.001,) if place.tiny else (0.5, 2.0, 5.2):
        memory = SharedVectors(int(gigabytes * 1e9 / 4))
        host, there = torch.from_numpy(memory.vector), torch.from_numpy(memory.delta).to(place.device)
        rates = {}
        for kind in ("pageable", "registered"):
            if kind == "registered":
                registered_s = place.seconds(lambda host=host: register([host], place.device))
            for way, (into, of) in {"up": (there, host), "down": (host, there)}.items():
                into.copy_(of)
                seconds = place.seconds(lambda into=into, of=of: into.copy_(of, non_blocking=True))
                rates[f"{kind}_{way}"] = round(gigabytes / seconds, 2)
        slowest = min(rates["registered_up"], rates["registered_down"])
        name = f"copies of registered memory, {gigabytes:g} GB"
        say(name, slowest, "GB/s", "≥ 40", registration_s_per_gb=round(registered_s / gigabytes, 3), **rates)


# --- the vector ---------------------------------------------------------------------------------------------------


def _exchange(model: nn.Module, place: Place) -> tuple[dict[str, float], list[int]]:
    """One of each operation: seconds, and checksums of the values that come of them."""
    vector = ModelVector(model)
    seconds: dict[str, float] = {}
    memory = SharedVectors(vector.layout.total)
    shared, delta = torch.from_numpy(memory.vector), torch.from_numpy(memory.delta)
    register([shared, delta, *vector.on_host()], place.device)
    torch.arange(len(shared), out=shared).remainder_(8191).mul_(1e-5)

    def step() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.015625)  # exact in each type, so that a device has no rounding of its own

    def timed(name: str, do: Callable[[], object]) -> None:
        seconds[name] = round(place.seconds(do), 4)

    timed("load", lambda: vector.load(memory.vector))
    step()
    timed("delta", lambda: vector.cut(memory.delta))
    found = [checksum(delta)]
    timed("settle", lambda: vector.add_to_base(delta))
    shared.mul_(0.5)
    step()
    timed("enter", lambda: vector.enter(shared))
    timed("read", lambda: vector.read(memory.vector))
    found.append(checksum(shared))
    timed("shared", vector.load_shared)
    vector.read(memory.vector)
    return seconds, [*found, checksum(shared)]


def _unfilled(options: dict[str, Any], dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A model without values, which a load gives it: to make them up takes a processor minutes."""
    with torch.device("meta"):
        model: Any = gpt(read_options(GptOptions, options, "gpt")).to(dtype)
    model.to_empty(device=device)
    model.scores.weight = model.bytes.weight
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return cast(nn.Module, model)


def vector(place: Place) -> None:
    """What passes between host and device in an exchange, its memory, and its bits."""
    for name, options in place.models.items():
        for dtype in (torch.float32, torch.bfloat16):
            model = _unfilled(options, dtype, place.device)
            values = sum(parameter.numel() for parameter in model.parameters())
            before = 0 if place.tiny else torch.cuda.memory_allocated()
            if not place.tiny:
                torch.cuda.reset_peak_memory_stats()
            seconds, found = _exchange(model, place)
            peak = 0 if place.tiny else torch.cuda.max_memory_allocated() - before
            details = {"seconds": seconds, "peak_mb": round(peak / 1e6), "float32_mb": round(4 * values / 1e6)}
            kind = str(dtype).removeprefix("torch.")
            say(f"an exchange of {name} in {kind}", seconds["delta"] + seconds["enter"], "s", **details)
            del model
            same = _exchange(_unfilled(options, dtype, torch.device("cpu")), Place(tiny=True))[1] == found
            say(f"bits of {name} in {kind} as on the processor", float(same), "", "≥ 1")


# --- tests --------------------------------------------------------------------------------------------------------


def tests(_: Place) -> None:
    """Everything that is marked `cuda`."""
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.cuda" in path.read_text(encoding="utf-8")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "cuda", *map(str, marked)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    sys.stderr.write(ran.stdout)
    last = ran.stdout.strip().splitlines()[-1] if ran.stdout.strip() else ran.stderr[-200:]
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    say("tests on the GPU that fail", float(failed), "", "≤ 0", **counts, last=last)


# --- daemons ------------------------------------------------------------------------------------------------------


def _training(options: dict[str, Any], place: Place, **more: Any) -> TrainingSettings:
    given = {"eval_steps": 0, "checkpoint_s": 0.0, "local_steps": LOCAL_STEPS, "device": str(place.device)} | more
    return TrainingSettings(task=TASK, options=options, **given)


def _bare(options: dict[str, Any], place: Place, seconds: float) -> float:
    """Optimiser steps a second of the plain loop."""
    task, spec = build_task(TASK, options, data_dir="", seed=0, node_seed=1, device=str(place.device))
    batches = iter(task.batches())
    optimizer: Any = spec.optimizer

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for _ in range(spec.accumulate):
            (task.loss(spec.model, next(batches)) / spec.accumulate).backward()
        optimizer.step()

    for _ in range(3):
        step()
    place.wait()
    began_s, count = time.perf_counter(), 0
    while time.perf_counter() - began_s < seconds:
        step()
        count += 1
    place.wait()
    return count / (time.perf_counter() - began_s)


def _rate(nodes: list[Daemon], seconds: float) -> float:
    """Optimiser steps a second of all these nodes, from the end of a turn to that of another."""

    def edges() -> list[tuple[int, float]]:
        found = []
        for node in nodes:
            before = (status(node) or {"training": {"optimizer_steps": 0}})["training"]["optimizer_steps"]
            now = wait_until(
                node, lambda seen, before=before: seen["training"]["optimizer_steps"] > before, what="training"
            )
            found.append((now["training"]["optimizer_steps"], time.monotonic()))
        return found

    began = edges()
    time.sleep(seconds)
    return sum(
        (last - first) / (ended_s - began_s) for (first, began_s), (last, ended_s) in zip(began, edges(), strict=True)
    )


def overhead(place: Place) -> None:
    """A node against the plain loop, alone and with another one on the same GPU."""
    compiled = [] if place.tiny else [("124 M compiled", SMALL | {"compiled": True})]
    for name, options in [*place.models.items(), *compiled]:
        window_s = 1.0 if place.tiny else 8.0
        words = options["batch_size"] * options["accumulate"] * options.get("context", 1024)
        flags = ["--options", json.dumps(options), "--seconds", str(window_s)] + ["--tiny"] * place.tiny
        command = [sys.executable, "-m", "benchmarks.gpu_sections", "bare", *flags]
        bare = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        theirs = float(bare.stdout)
        for count in (2,) if place.tiny else (1, 2):
            with daemons() as group:
                nodes = _started(group, count, options, place)
                ours = _rate(nodes, window_s)
                rows = nodes[0].client.steps(3) if nodes[0].client is not None else []
            details = {"bare_words_per_s": round(theirs * words), "words_per_s": round(ours * words), "steps": rows}
            which = "a node" if count == 1 else "two nodes"
            say(f"words/s of {which} over the plain loop's, {name}", ours / theirs, "", "≥ 0.97", **details)


def _started(group: Daemons, count: int, options: dict[str, Any], place: Place) -> list[Daemon]:
    nodes: list[Daemon] = []
    for _ in range(count):
        joined = nodes[0].listens_at if nodes else ""
        nodes.append(group.start(_training(options, place, min_nodes=count, threads=1), bootstrap=joined))
        wait_until(nodes[0], lambda found: bool(found.get("node", {}).get("address")), what="there")
    for node in nodes:
        wait_until(node, lambda found: found["step"] >= 2, what="training", within_s=90)
    return nodes


def run_ahead(place: Place) -> None:
    """Two trainers of one device take equally many optimiser steps, however far their programs run ahead of it."""
    options = TINY if place.tiny else SMALL | {"batch_size": 2, "accumulate": 1}
    name = place.device.type if place.tiny else str(place.device)
    with daemons() as group:
        training = _training(options, place, device=[name] * 2, threads=1)
        node = group.start(training)
        found = wait_until(node, lambda found: found["step"] >= 4, what="training", within_s=90)
    steps = [device["optimizer_steps"] for device in found["devices"]]
    say(
        "steps of the slower of two trainers on one GPU over the faster one's",
        min(steps) / max(steps),
        "",
        "≥ 0.8",
        steps=steps,
    )


# --- safety -------------------------------------------------------------------------------------------------------


def safety(place: Place) -> None:
    """Captured graphs read what is loaded, half precision skips what overflows, adapters leave the rest."""
    options = read_options(GptOptions, TINY | {"accumulate": 1}, "gpt")
    torch.manual_seed(0)
    model = gpt(options).to(place.device)
    words = torch.randint(0, options.vocabulary, (2, options.context + 1), device=place.device)

    def loss_of() -> torch.Tensor:
        return nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

    held = ModelVector(model)
    addresses = [tensor.data_ptr() for tensor in held.tensors]
    replay = _captured(loss_of, place)
    same = True
    for seed in range(3):
        values = np.random.default_rng(seed).standard_normal(held.layout.total, dtype=np.float32) * np.float32(0.02)
        held.enter(torch.from_numpy(values))
        with torch.no_grad():
            same = same and bool(torch.isclose(replay(), loss_of(), rtol=1e-5))
    same = same and addresses == [tensor.data_ptr() for tensor in held.tensors]
    say("a captured graph reads the values that have entered", float(same), "", "≥ 1")

    for parameter in model.parameters():
        parameter.requires_grad_(requires_grad=False)
    model.adapter = nn.Linear(4, 4).to(place.device)
    say("adapters alone are exchanged", float(ModelVector(model).layout.total == 20), "", "≥ 1")

    layer = nn.Linear(4, 4).to(place.device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(place.device.type)
    before, scale = layer.weight.clone(), scaler.get_scale()
    scaler.scale(layer(torch.full((1, 4), float("inf"), device=place.device)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    skipped = torch.equal(before, layer.weight) and scaler.get_scale() < scale
    say("an overflow of half precision is skipped", float(skipped), "", "≥ 1")


def _captured(loss_of: Callable[[], torch.Tensor], place: Place) -> Callable[[], torch.Tensor]:
    """The loss by a captured graph; without a GPU the same calls again."""
    if place.tiny:
        return loss_of
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss_of()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = loss_of()

    def replay() -> torch.Tensor:
        graph.replay()
        return result.clone()

    return replay


# --- faults -------------------------------------------------------------------------------------------------------


def faults(place: Place) -> None:
    """What a node says of a trainer that its GPU ended, and how long until it trains again."""
    for fault in ("memory",) if place.tiny else ("memory", "assert", "kill"):
        with daemons() as group, tempfile.TemporaryDirectory() as folder:
            node = group.start(_training(TINY | {"fault": fault, "mark": f"{folder}/mark"}, place, threads=1))
            wait_until(node, lambda found: found["training"]["trainer_failures"] > 0, what="failing", within_s=90)
            began_s, before = time.monotonic(), _memory(place)
            found = wait_until(
                node,
                lambda found: found["training"]["trainer"] == "running" and found["training"]["trainer_failures"] == 1,
                what="restarted",
                within_s=90,
            )
            step = found["step"]
            wait_until(node, lambda found, step=step: found["step"] > step, what="training again", within_s=90)
            seconds = time.monotonic() - began_s
            said = re.findall(r"trainer_died.* reason=(.*)", node.log.read_text(errors="replace"))
            memory = {"before": before, "after": _memory(place)}
        text = said[0] if said else ""
        say(f"from the fault {fault} to training again", seconds, "s", "≤ 30", said=text[:300], gpu_memory_bytes=memory)
        wanted = {"memory": "too little memory", "assert": "out of range", "kill": "SIGKILL"}[fault]
        say(f"the fault {fault} is named", float(wanted in text), "", "≥ 1")
    if not place.tiny:
        with daemons() as group, _hidden():
            node = group.start(_training(TINY, place, threads=1))
            ended = node.ends_within(60)
            named = "is not available" in node.log.read_text(errors="replace")
        say("a node without its GPU ends and says so", float(ended and named), "", "≥ 1")


@contextlib.contextmanager
def _hidden() -> Iterator[None]:
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def _memory(place: Place) -> int | None:
    """Memory of the GPU in use by all programs; None where nobody can be asked."""
    if place.tiny:
        return None
    monitor = GpuMonitor({"cuda:0": f"GPU-{torch.cuda.get_device_properties(0).uuid}"})
    if not monitor.open():
        return None
    monitor.read()
    return monitor.readings["cuda:0"].memory_used_bytes


# --- checkpoint ---------------------------------------------------------------------------------------------------


def checkpoint(place: Place) -> None:
    """How long a checkpoint holds a step, and whether the step after a restore has the same bits."""
    name, options = list(place.models.items())[-1]
    options = options | {"batch_size": 1, "accumulate": 1}
    torch.use_deterministic_algorithms(mode=place.tiny)

    def runner() -> TaskRunner:
        task, spec = build_task(TASK, options, data_dir="", seed=0, node_seed=1, device=str(place.device))
        return TaskRunner(TASK, task, spec)

    written = threading.Event()

    def send(message: messages.FromTrainer) -> None:
        if isinstance(message, messages.Written | messages.NotWritten):
            written.set()

    writer = StateWriter(send, pool=CopyPool(lambda tensor: tensor.numel() > 1))
    with tempfile.TemporaryDirectory(prefix="p2pnode-bench-") as folder:
        first = runner()
        start = _values(first)
        first.use(start, np.zeros_like(start))
        first.train(StepOrder(1, 2, 1.0, is_first=True))
        held_s, written_s = [], []
        for turn in range(2):  # the second one has memory that is registered
            written.clear()
            began_s = time.perf_counter()
            with first.loads.saving():
                writer.save(turn, Path(folder) / "state", first.state())
            held_s.append(round(time.perf_counter() - began_s, 3))
            written.wait()
            written_s.append(round(time.perf_counter() - began_s, 3))
        say(f"a checkpoint of {name} holds a step", held_s[-1], "s", "≤ 0.3", held_s=held_s, written_s=written_s)
        at = _values(first)
        first.train(StepOrder(2, 1, 1.0, is_first=True))
        wanted = _values(first)
        del first
        again = runner()
        again.use(at, np.zeros_like(at))
        again.restore(Path(folder) / "state")
        again.train(StepOrder(2, 1, 1.0, is_first=True))
    say("bits of the step after a restore", float(wanted.tobytes() == _values(again).tobytes()), "", "≥ 1")


def _values(runner: TaskRunner) -> Vector:
    found = np.zeros(runner.model_vector.layout.total, np.float32)
    runner.model_vector.read(found)
    return found


SECTIONS: dict[str, Callable[[Place], None]] = {
    "facts": facts,
    "copies": copies,
    "vector": vector,
    "tests": tests,
    "overhead": overhead,
    "safety": safety,
    "run-ahead": run_ahead,
    "faults": faults,
    "checkpoint": checkpoint,
}


def main() -> int:
    # As Ctrl-C does, so that the daemons of a section end with it.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    line = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_sections", description=(__doc__ or "").splitlines()[0]
    )
    line.add_argument("section", choices=[*SECTIONS, "bare"])
    line.add_argument("--tiny", action="store_true")
    line.add_argument("--options", type=json.loads, default={})
    line.add_argument("--seconds", type=float, default=1.0)
    arguments = line.parse_args()
    place = Place(tiny=arguments.tiny)
    if arguments.tiny:
        torch.set_num_threads(1)
    if arguments.section == "bare":
        print(_bare(arguments.options, place, arguments.seconds))
    else:
        SECTIONS[arguments.section](place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
