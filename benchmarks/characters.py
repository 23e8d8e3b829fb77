"""characters: a transformer of 1.3 M parameters on three daemons, each with a third of a text, beside one process.

The text is CPython's own reference (`pydoc_data.topics`), so that every machine has it. Each node makes 600 optimiser
steps with batches of 8 on its third. One process makes as many with batches of 24, 8 from each third; another has one
third alone. All are evaluated on the same part of the text, which none trains on. In the disturbed swarm one node joins
late, one is killed and one is stopped for 20 s. Its reference has the same late node, and a node that leaves in order
where the other is killed, so that both lose the same data. `--ways "three nodes, pssp"` runs that alone.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import msgspec
import torch

from benchmarks.daemons import Daemon, Daemons, daemons, wait_until
from benchmarks.record import NotMeasured, Outcome, Series
from p2pnode.training.settings import BarrierMethod, BarrierSettings, TrainingSettings
from p2pnode.training.tasks.text import Text, TextOptions

NODES = 3
OPTIONS = TextOptions(layers=4, width=160, heads=4, context=32, batch_size=8, learning_rate=1e-3, warmup=100)
LOCAL_STEPS = 10
STEPS = 60
EVAL_STEPS = 10
SEEDS = 1
METHODS: tuple[BarrierMethod, ...] = ("bsp", "pssp", "asp")
LATE_AT, KILL_AT, STOP_AT = 10, 25, 15
STOPPED_S = 20.0
LIMIT_S = 1800.0
LOOK_S = 0.2
AIM = "≤ 1.01"
LEAVES, KILLED = "three nodes, one late, one leaves", "three nodes, one late, one killed, one stopped"

Curve = list[tuple[int, float]]


class Corpus:
    """The text, cut into a part for each node and one for evaluation, as files for the task `text`.

    That task evaluates on the last tenth of its file. A file is therefore nine parts of training text and one part of
    the common text.
    """

    def __init__(self, folder: Path) -> None:
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        part = len(text) // (9 * NODES + 1)
        common = text[-part:]
        self.files = []
        for node in range(NODES):
            self.files.append(folder / f"third-{node}.txt")
            self.files[-1].write_bytes(text[node * 9 * part : (node + 1) * 9 * part] + common)


def measure(arguments: argparse.Namespace) -> Outcome:
    seeds = range(arguments.repetitions or SEEDS)
    with tempfile.TemporaryDirectory(prefix="p2pnode-characters-") as folder:
        corpus = Corpus(Path(folder))
        curves: dict[str, list[Curve]] = {}

        runs = _runs(corpus)
        if unknown := [name for name in arguments.ways if name not in runs]:
            raise NotMeasured(f'--ways "{unknown[0]}": there are {"; ".join(runs)}')
        for name in arguments.ways or runs:
            curves[name] = []
            for seed in seeds:
                began = time.monotonic()
                curves[name].append(runs[name](seed))
                took_s = time.monotonic() - began
                print(f"  {name}, seed {seed}: {curves[name][-1][-1][1]:.4f} in {took_s:.0f} s", file=sys.stderr)

    losses = {name: [curve[-1][1] for curve in found] for name, found in curves.items()}
    series = [
        Series(f"loss of {name}", "nats per byte", losses[name], details={"curves": curves[name]}) for name in curves
    ]
    if {LEAVES, KILLED} <= losses.keys():
        ratios = [one / other for one, other in zip(losses[KILLED], losses[LEAVES], strict=True)]
        series.append(Series("loss of the disturbed swarm over its reference", "times", ratios, AIM))
    return Outcome(
        "characters",
        f"bytes of CPython's reference, transformer of {parameters() / 1e6:.1f} M parameters, AdamW "
        f"{OPTIONS.learning_rate:g}, {STEPS} steps of {LOCAL_STEPS} optimiser steps with batches of "
        f"{OPTIONS.batch_size} × {OPTIONS.context} bytes per node, default exchange; "
        f"validation loss of the final model; late: joins at step {LATE_AT}; killed or leaving at step {KILL_AT}; "
        f"stopped for {STOPPED_S:g} s at step {STOP_AT}",
        series,
    )


def _runs(corpus: Corpus) -> dict[str, Callable[[int], Curve]]:
    """What is compared, by name: each takes a seed."""
    return {
        "one process, batches of 24": lambda seed: one_process(corpus.files, seed),
        "one node alone": lambda seed: one_process(corpus.files[:1], seed),
        **{f"three nodes, {method}": partial(swarm, corpus, method) for method in METHODS},
        LEAVES: lambda seed: swarm(corpus, "pssp", seed, Leaves()),
        KILLED: lambda seed: swarm(corpus, "pssp", seed, Killed()),
    }


def parameters() -> int:
    from p2pnode.training.tasks.text import ByteTransformer

    return sum(value.numel() for value in ByteTransformer(OPTIONS).parameters())


def one_process(files: list[Path], seed: int) -> Curve:
    """Train on the parts together, a batch from each; the curve holds (step, validation loss)."""
    torch.manual_seed(seed)
    options = msgspec.to_builtins(OPTIONS)
    tasks = [
        Text(options, data_dir=str(file), seed=seed, node_seed=seed * 100 + place, device="cpu")
        for place, file in enumerate(files)
    ]
    spec = tasks[0].build()
    batches = [task.batches() for task in tasks]
    curve: Curve = []
    for step in range(1, STEPS + 1):
        spec.model.train()
        for _ in range(LOCAL_STEPS):
            read, wanted = (torch.cat(parts) for parts in zip(*(next(each) for each in batches), strict=True))
            spec.optimizer.zero_grad()
            tasks[0].loss(spec.model, (read, wanted)).backward()
            torch.nn.utils.clip_grad_norm_(spec.model.parameters(), 1.0)
            spec.optimizer.step()
            if spec.scheduler is not None:
                spec.scheduler.step()
        if step % EVAL_STEPS == 0:
            curve.append((step, _loss(tasks[0], spec.model)))
    return curve


def _loss(task: Text, model: torch.nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        return task.evaluate(model)[0]["loss"]


class Undisturbed:
    """All nodes start together and nothing happens to them."""

    late = 0

    def act(self, nodes: list[Daemon], step: int) -> None:
        """Called with the lowest step of the nodes that train."""


class Leaves(Undisturbed):
    """One node joins late; another leaves in order."""

    late = 1

    def __init__(self) -> None:
        self.left = False

    def act(self, nodes: list[Daemon], step: int) -> None:
        if step >= KILL_AT and not self.left:
            self.left = True
            self.end(nodes[1])

    def end(self, node: Daemon) -> None:
        node.terminate()


class Killed(Leaves):
    """One node joins late; another is killed; the first one is stopped for 20 s."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped_at: float | None = None
        self.continued = False

    def end(self, node: Daemon) -> None:
        node.signal(signal.SIGKILL)

    def act(self, nodes: list[Daemon], step: int) -> None:
        super().act(nodes, step)
        if step >= STOP_AT and self.stopped_at is None:
            self.stopped_at = time.monotonic()
            nodes[0].signal(signal.SIGSTOP)
        elif self.stopped_at is not None and not self.continued and time.monotonic() - self.stopped_at >= STOPPED_S:
            self.continued = True
            nodes[0].signal(signal.SIGCONT)


def swarm(
    corpus: Corpus,
    method: BarrierMethod,
    seed: int,
    course: Undisturbed | None = None,
) -> Curve:
    """Train on daemons; the last entry of the curve is the loss of the model that a node exported at the end."""
    course = course or Undisturbed()
    curve: dict[int, list[float]] = {}
    group: AbstractContextManager[Daemons] = daemons()
    with group as here:
        nodes: list[Daemon] = []

        def start(place: int) -> None:
            settings = TrainingSettings(
                task="text",
                data_dir=str(corpus.files[place]),
                min_nodes=NODES - course.late if place < NODES - course.late else 1,
                local_steps=LOCAL_STEPS,
                threads=1,
                seed=seed,
                eval_steps=EVAL_STEPS,
                max_steps=STEPS,
                checkpoint_s=0.0,
                export=str(here.folder / f"model-{place}.safetensors"),
                options=msgspec.to_builtins(OPTIONS),
            )
            bootstrap = _address(nodes[0]) if nodes else ""
            nodes.append(here.start(settings, bootstrap=bootstrap, barrier=BarrierSettings(method=method)))

        for place in range(NODES - course.late):
            start(place)
        deadline = time.monotonic() + LIMIT_S
        while any(node.exit_code is None for node in nodes):
            if time.monotonic() > deadline:
                raise NotMeasured(f"the run did not end within {LIMIT_S:g} s")
            for node in nodes:
                _note(node, curve)
            step = max((int(node.status["step"]) for node in nodes if node.status is not None), default=0)
            if len(nodes) < NODES and step >= LATE_AT:
                start(len(nodes))
            course.act(nodes, step)
            time.sleep(LOOK_S)
        return [*((step, statistics.fmean(losses)) for step, losses in sorted(curve.items())), _final(here, corpus)]


def _address(node: Daemon) -> str:
    found = wait_until(node, lambda shown: bool((shown.get("node") or {}).get("address")), what="listening")
    return str(found["node"]["address"])


def _note(node: Daemon, curve: dict[int, list[float]]) -> None:
    """Keep an evaluation that the node has made since the last look."""
    before = _evaluated(node)
    if node.exit_code is not None or node.client is None:
        return
    node.refresh()
    after = _evaluated(node)
    if after is not None and after != before and after[0] < STEPS:
        curve.setdefault(after[0], []).append(after[1])


def _evaluated(node: Daemon) -> tuple[int, float] | None:
    training: dict[str, Any] = (node.status or {}).get("training") or {}
    loss = (training.get("metrics") or {}).get("loss")
    step = training.get("evaluated_step")
    return None if loss is None or not step else (int(step), float(loss))


def _final(here: Daemons, corpus: Corpus) -> tuple[int, float]:
    """The validation loss of the exported model."""
    from safetensors.torch import load_file

    files = sorted(here.folder.glob("model-*.safetensors"))
    if not files:
        raise NotMeasured("no node exported a model")
    task = Text(msgspec.to_builtins(OPTIONS), data_dir=str(corpus.files[0]), seed=0, node_seed=0, device="cpu")
    losses = []
    for file in files:
        model = task.build().model
        model.load_state_dict(load_file(file), strict=False)
        losses.append(_loss(task, model))
    return STEPS, statistics.fmean(losses)
