"""lifecycle: start, join, steps, checkpoint and resume of two daemons with a stub trainer, at 350 M and 1 B parameters.

The trainers have a vector and a delta and no model (`benchmarks.vector_daemon`); the daemons are whole. The first one
starts alone and the second joins it. When every shard has an owner and a backup, some steps and a checkpoint of each
are awaited. Then both are told to end at once, and are started again from what they have written. Memory is
looked at twice a second: what the kernel counts as each daemon's own, its files' and its shared part, and what the
machine has left. `--ways` names settings, as in `codec = "sparse", on_disk = ["residual"]`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import statistics
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.daemons import Daemon, Daemons, daemons, status, wait_until
from benchmarks.record import NotMeasured, Outcome, Series
from training.settings import ExchangeSettings, TrainingSettings

MILLIONS = (350.0, 1000.0)
#: Where nothing else is asked for: no momentum, whole values as pulls, and residual, log and delta in files. Of each
#: node's memory little more than the vector and the shards stays, eight bytes per parameter. The trainer has no base of
#: its own, which the check of the memory at the start would count.
WAY = (
    'codec = "sparse", pull_codec = "bfloat16", carry = 0.0, overlap = false, on_disk = ["residual", "log"], '
    "delta_on_disk = true"
)
CHECKPOINT_S = 5.0
STEPS = 3
REST_S = 1.0
#: Longest wait for a start, a hand-over, some steps or checkpoints, or an end.
DEADLINE_S = 900.0
LOOK_S = 0.5
#: Less free memory than this ends the measurement, before the kernel ends something else.
LEAST_FREE_BYTES = 600_000_000
OWN, FILES, SHARED = "RssAnon", "RssFile", "RssShmem"


class MemoryWatch:
    """Looks at the memory of daemons, and at what the machine has left, in a thread; keeps the extremes."""

    def __init__(self, group: Daemons) -> None:
        self._group = group
        self._ended = threading.Event()
        #: By process and field of /proc/PID/status: the most bytes.
        self.most: dict[tuple[int, str], int] = {}
        self.least_free_bytes = _free_bytes()
        self.stopped_for = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.pids: list[int] = []
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            for pid in list(self.pids):
                for field, size in memory_of(pid).items():
                    self.most[pid, field] = max(size, self.most.get((pid, field), 0))
            self.least_free_bytes = min(self.least_free_bytes, _free_bytes())
            if self.least_free_bytes < LEAST_FREE_BYTES and not self.stopped_for:
                self.stopped_for = f"only {self.least_free_bytes / 1e6:,.0f} MB were free"
                self._group.end()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()


def measure(arguments: argparse.Namespace) -> Outcome:
    ways = arguments.ways or [WAY]
    series: list[Series] = []
    for millions in arguments.parameters or MILLIONS:
        for way in ways:
            label = f"{millions:g} M" if len(ways) == 1 else f"{millions:g} M, {way}"
            series += _measured(int(millions * 1e6), way, label)
    return Outcome(
        "lifecycle",
        "two daemons on the loopback of one machine with a stub trainer that writes its delta anew and then rests "
        f"{REST_S:g} s, pssp, {'; '.join(ways)}, a checkpoint {CHECKPOINT_S:g} s after the last; memory: what the "
        "kernel counts as the daemon's own (RssAnon), the most of both nodes, looked at twice a second from the join "
        "until both have ended; the vector (4 bytes per parameter) is shared memory and does not count",
        series,
    )


def settings_of(way: str) -> tuple[ExchangeSettings, dict[str, Any]]:
    """The exchange, and further settings of `[training]`. Raises `NotMeasured` for what is no setting."""
    try:
        given = tomllib.loads(f"way = {{{way}}}")["way"]
        further = {name: given.pop(name) for name in ("delta_on_disk",) if name in given}
        return msgspec.convert(given, ExchangeSettings), further
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise NotMeasured(f"{way!r} are no settings: {error}") from error


def memory_of(pid: int) -> dict[str, int]:
    """Bytes of a process by kind; nothing where it has ended. Linux only."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            if name in (OWN, FILES, SHARED):
                found[name] = 1024 * int(rest.split()[0])
    return found


def _free_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    raise NotMeasured("this system does not tell how much memory is free")


def _measured(parameters: int, way: str, label: str) -> list[Series]:
    exchange, further = settings_of(way)
    training = TrainingSettings(
        options={"parameters": parameters, "rest_s": REST_S},
        checkpoint_s=CHECKPOINT_S,
        keep_checkpoints=1,
        eval_steps=0,
        hang_s=120.0,
        **further,
    )
    with daemons() as group:
        watch = MemoryWatch(group)
        try:
            return _life(group, watch, training, exchange, parameters, label)
        except NotMeasured as error:
            raise NotMeasured(f"{label}: {watch.stopped_for or error}") from error
        finally:
            watch.stop()


def _life(
    group: Daemons,
    watch: MemoryWatch,
    training: TrainingSettings,
    exchange: ExchangeSettings,
    parameters: int,
    label: str,
) -> list[Series]:
    began_s = time.monotonic()
    nodes = [_start(group, training, exchange, "")]
    _until(nodes[0], lambda found: found["step"] >= 1, "at its first step")
    start_s, began_s = time.monotonic() - began_s, time.monotonic()
    nodes.append(_start(group, training, exchange, nodes[0].listens_at))
    _until(nodes[1], lambda found: found["state"] in ("training", "waiting"), "training")
    join_s, began_s = time.monotonic() - began_s, time.monotonic()
    watch.pids = [node.pid for node in nodes]
    _until_shared(nodes)
    hand_over_s = time.monotonic() - began_s
    befores = [_until(node, lambda _: True, "there")["step"] for node in nodes]
    for node, before in zip(nodes, befores, strict=True):
        _until(node, lambda found, before=before: found["step"] >= before + STEPS, f"{STEPS} steps further")
    rows = [row for node in nodes if node.client is not None for row in node.client.steps(STEPS)]
    written = [_checkpoint_after(node) for node in nodes]
    found = [_until(node, lambda _: True, "there") for node in nodes]
    pids, steps = list(watch.pids), [one["step"] for one in found]
    began_s = time.monotonic()
    for node in nodes:
        os.kill(node.pid, signal.SIGTERM)
    while any(node.exit_code is None for node in nodes):
        if time.monotonic() - began_s > DEADLINE_S:
            raise NotMeasured(f"the nodes did not end within {DEADLINE_S:g} s")
        time.sleep(0.1)
    if codes := [node.exit_code for node in nodes if node.exit_code]:
        raise NotMeasured(f"exit code {codes[0]}; the last lines:\n{nodes[0].last_lines()}\n{nodes[1].last_lines()}")
    end_s, began_s = time.monotonic() - began_s, time.monotonic()
    nodes = [group.start_again(node) for node in nodes]
    for node in nodes:
        _until(node, lambda _: True, "there")
    watch.pids = [node.pid for node in nodes]
    for node, step in zip(nodes, steps, strict=True):
        _until(node, lambda found, step=step: found["step"] > step, f"further than step {step}")
    resume_s = time.monotonic() - began_s
    resumed = [watch.most.get((node.pid, OWN), 0) for node in nodes]
    own = [watch.most.get((pid, OWN), 0) for pid in pids]
    parts = max((one["memory"] for one in found), key=lambda memory: memory["private_bytes"] or 0)
    whole = [sum(row.get(f"{phase}_seconds", 0.0) for phase in ("train", "push", "wait", "pull")) for row in rows]
    return [
        Series(f"start to the first step, {label}", "s", [start_s]),
        Series(f"joiner's start to its training, {label}", "s", [join_s]),
        Series(f"hand-over, {label}", "s", [hand_over_s]),
        Series(f"step, {label}", "s", whole, "", {"train_s": [round(row["train_seconds"], 2) for row in rows]}),
        Series(f"checkpoint, {label}", "s", [fields["seconds"] for fields in written]),
        Series(f"pause of a step at a checkpoint, {label}", "s", [fields["held_seconds"] for fields in written]),
        Series(f"end of both with their last checkpoints, {label}", "s", [end_s]),
        Series(f"resume, start of both to a new step of each, {label}", "s", [resume_s], "", {"steps": steps}),
        Series(
            f"most memory of a daemon's own per parameter, {label}",
            "bytes",
            [size / parameters for size in own],
            "≤ 20",
            {
                "held_bytes_per_parameter": parts["held_bytes_per_parameter"],
                "on_disk": parts["on_disk"],
                "shared": [watch.most.get((pid, SHARED), 0) for pid in pids],
                "files": [watch.most.get((pid, FILES), 0) for pid in pids],
                "median_step_s": round(statistics.median(whole), 2),
            },
        ),
        Series(f"the same while they resume, {label}", "bytes", [size / parameters for size in resumed]),
        Series(f"least memory free on the machine, {label}", "MB", [watch.least_free_bytes / 1e6]),
    ]


def _start(group: Daemons, training: TrainingSettings, exchange: ExchangeSettings, bootstrap: str) -> Daemon:
    return group.start(
        training,
        bootstrap=bootstrap,
        command=("benchmarks.vector_daemon",),
        exchange=exchange,
        port=_free_port(),  # the same after the restart
    )


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _until_shared(nodes: list[Daemon]) -> None:
    """Until every shard has an owner and a backup. A node that is slow meanwhile owns none of them."""
    deadline, held = time.monotonic() + DEADLINE_S, list[dict[str, Any]]()
    while time.monotonic() < deadline:
        held = [found["exchange"] for node in nodes if (found := status(node)) is not None]
        if len(held) == len(nodes):
            owned, backed = (sum(one[key] for one in held) for key in ("shards_owned", "shards_backed"))
            if owned == backed == held[0]["shards"]:
                return
        time.sleep(LOOK_S)
    raise NotMeasured(f"the shards were not handed over within {DEADLINE_S:g} s: {held}")


def _checkpoint_after(node: Daemon) -> dict[str, float]:
    """The fields of the next checkpoint that the node writes, or of its last one."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        events = node.client.events()["events"] if node.client is not None else []
        found = [event["fields"] for event in events if event["event"] == "checkpoint_written"]
        if found:
            return dict(found[-1])
        time.sleep(LOOK_S)
    raise NotMeasured(f"{node.name} wrote no checkpoint within {DEADLINE_S:g} s")


def _until(node: Daemon, holds: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
    return wait_until(node, holds, what=what, look_s=0.2, within_s=DEADLINE_S)
