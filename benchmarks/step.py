"""step: the cost of the step path around a trainer that takes no time, and the delay of the event loop meanwhile.

Real daemons with a stub trainer (`benchmarks.gated_daemon`). Phases are the daemon's own rows of `/steps`. Loop delay
is that of a task in the daemons' loops (`benchmarks.probed`), while all of them exchange vectors of 100 MB without a
pause. Step queries go from one node to another over datagrams, as a barrier sends them, unencrypted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import contestants as of
from benchmarks.contestants import Ours, Way
from benchmarks.probed import window
from benchmarks.record import ROOT, NotMeasured, Outcome, Series

REPETITIONS = 5
PARAMETERS = 4_000_000
LARGE = 25_000_000
FREE_STEPS = 8
PHASES = ("push_seconds", "wait_seconds", "pull_seconds")
QUERIES_S = 3.0
AT_ONCE = 32


def measure(arguments: argparse.Namespace) -> Outcome:
    repetitions = arguments.repetitions or REPETITIONS
    series: list[Series] = []
    for peers in arguments.peers or (1, 4):
        series += _phases(peers, repetitions)
    series += _loop_delay(Way(), 2, repetitions, aim="≤ 20")
    series += _loop_delay(Way("sparse"), 2, repetitions, aim="≤ 2")
    for at_once in (1, AT_ONCE):
        rates = [_queries(at_once) for _ in range(repetitions)]
        series.append(Series(f"step queries, {at_once} at once", "per second", rates))
    return Outcome(
        "step",
        "real daemons on the loopback with a stub trainer that takes no time; phases: medians over "
        f"{FREE_STEPS} steps in a row of each daemon, bfloat16, a backup, pssp; loop delay: a task that sleeps 2 ms "
        "and notes how late it wakes, in every daemon, while two of them exchange 100 MB vectors (float32 or sparse, "
        "replicas = 0, asp) without a pause; queries: two overlay nodes, a process each",
        series,
    )


def _phases(peers: int, repetitions: int) -> list[Series]:
    way = Way("bfloat16", replicas=1 if peers > 1 else 0, barrier="pssp")
    label = f"{PARAMETERS / 1e6:g} M, {peers} node{'s' * (peers > 1)}"
    taken: dict[str, list[float]] = {phase: [] for phase in PHASES}
    with of.ours(way, peers, PARAMETERS, free_steps=FREE_STEPS) as group:
        group.turn()
        turns = []
        for _ in range(repetitions):
            turns.append(group.turn())
            rows = [row for node in group.nodes if node.client is not None for row in node.client.steps(FREE_STEPS)]
            for phase in PHASES:
                taken[phase].append(1000 * statistics.median(row[phase] for row in rows))
    found = [Series(f"{phase.split('_')[0]} of a step, {label}", "ms", taken[phase]) for phase in PHASES]
    cpu = [turn.cpu_seconds / peers / FREE_STEPS * 1000 for turn in turns]
    return [*found, Series(f"processor time of a step, {label}", "ms per node", cpu)]


def _loop_delay(way: Way, peers: int, repetitions: int, aim: str) -> list[Series]:
    with tempfile.TemporaryDirectory(prefix="p2pnode-bench-") as place:
        with of.ours(way, peers, LARGE, free_steps=FREE_STEPS, is_probed=True) as group:
            group.turn()
            windows = []
            for _ in range(repetitions):
                began_s = time.monotonic()
                group.turn()
                windows.append((began_s, time.monotonic()))
            kept = _collect(group, Path(place))
        late = [[late_ms for wakes in kept for late_ms in window(wakes, *one)] for one in windows]
    label = f"while {peers} nodes exchange 100 MB vectors" + (f" as {way.codec}" if way.codec != Way().codec else "")
    return [
        Series(f"loop delay p50, {label}", "ms", [float(np.percentile(one, 50)) for one in late]),
        Series(
            f"loop delay p99, {label}",
            "ms",
            [float(np.percentile(one, 99)) for one in late],
            aim,
            {"max_ms": [round(max(one), 2) for one in late]},
        ),
    ]


def _collect(group: Ours, place: Path) -> list[list[tuple[float, float]]]:
    """The wake-ups of every daemon, which writes them when it ends."""
    group.leave()
    found = []
    for number, file in enumerate(group.wakes):
        copy = place / f"{number}.json"
        with contextlib.suppress(FileNotFoundError):
            assert file is not None
            copy.write_bytes(file.read_bytes())
        if not copy.exists():
            raise NotMeasured(f"node {number} did not write when its loop woke")
        found.append([(now_s, late_ms) for now_s, late_ms in json.loads(copy.read_text())])
    return found


# -- step queries ------------------------------------------------------------------------------------------------


def _queries(at_once: int) -> float:
    """Answered queries per second."""
    with tempfile.TemporaryDirectory(prefix="p2pnode-bench-") as folder:
        command = [sys.executable, "-m", "benchmarks.step", folder]
        server = subprocess.Popen(
            [*command, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert server.stdout is not None
        assert server.stdin is not None
        try:
            address = server.stdout.readline().strip()
            asked = subprocess.run(
                [*command, "ask", address, str(at_once)],
                capture_output=True,
                text=True,
                timeout=60,
                cwd=ROOT,
                check=False,
            )
            if asked.returncode:
                raise NotMeasured(f"step queries failed:\n{asked.stderr[-1000:]}")
            return float(asked.stdout)
        finally:
            server.stdin.close()
            server.wait(timeout=30)


def _overlay(folder: Path) -> Any:
    from p2pnode.overlay.identity import load_identity, next_incarnation
    from p2pnode.overlay.overlay import Overlay
    from p2pnode.overlay.settings import LivenessSettings, NodeSettings, OverlaySettings, SwarmSettings
    from p2pnode.overlay.sockets.transport import SocketTransport
    from p2pnode.overlay.system import FolderDisk, SystemClock, SystemEntropy
    from tests.harness.environment.simulated import NoLog, make_environment

    clock, entropy, log = SystemClock(), SystemEntropy(), NoLog()
    disk = FolderDisk(folder)
    return Overlay(
        identity=load_identity(disk, entropy),
        incarnation=next_incarnation(disk, clock.wall()),
        boot_id=int.from_bytes(entropy.token(8), "big"),
        settings=OverlaySettings(
            NodeSettings(host="127.0.0.1", port=0), SwarmSettings(run="benchmark"), LivenessSettings()
        ),
        transport=SocketTransport("127.0.0.1", 0, log=log, clock=clock),
        environment=make_environment(clock=clock, entropy=entropy, disk=disk, log=log),
    )


async def _serve(folder: Path) -> None:
    overlay = _overlay(folder / "server")
    await overlay.start()
    overlay.found(os.urandom(16))
    sys.stdout.write(f"{overlay.address}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await overlay.stop()


async def _ask(folder: Path, address: str, at_once: int) -> None:
    from p2pnode.overlay.peers import Activity

    overlay = _overlay(folder / "client")
    await overlay.start()
    await overlay.join([address], genesis=None)
    overlay.announce(activity=Activity.TRAINING, step_seconds=60.0)
    (peer,) = overlay.members()
    answered = 0
    began_s = time.perf_counter()

    async def ask() -> None:
        nonlocal answered
        while time.perf_counter() - began_s < QUERIES_S:
            await overlay.query_steps([peer.node_id])
            answered += 1

    await asyncio.gather(*(ask() for _ in range(at_once)))
    sys.stdout.write(f"{answered / (time.perf_counter() - began_s):.1f}\n")
    await overlay.stop()


def main(arguments: Sequence[str]) -> None:
    import uvloop

    folder = Path(arguments[0])
    if arguments[1] == "serve":
        uvloop.run(_serve(folder))
    else:
        uvloop.run(_ask(folder, arguments[2], int(arguments[3])))


if __name__ == "__main__":
    main(sys.argv[1:])
