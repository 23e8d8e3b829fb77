"""dispatch_store: how many tasks a master hands out and takes back per second, with every change durable.

A queue of 10⁵ tasks, shuffled. Workers ask for a task and report it finished, 64 at a time and then one alone, for some
seconds each, in SQLite and in an etcd of its own on loopback. Each dispatch is two changes. Beside that: how long the
event loop stood still at most, what the queue takes in memory, and how long a master recovers it from the store.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

from benchmarks.record import NotMeasured, Outcome, Series
from p2pnode.overlay.environment import Environment
from p2pnode.overlay.system import FolderDisk, SystemClock, SystemEntropy, ThreadExecutor
from p2pnode.training.dispatch.answers import Answer, QueueEvent, QueueRules, Registration, ReportAnswer
from p2pnode.training.dispatch.chunks import ChunkTable, DatasetChunk
from p2pnode.training.dispatch.open_store import open_store
from p2pnode.training.dispatch.stored_queue import StoredQueue
from tests.process.harness.etcd_server import EtcdServer, etcd_binary

REPETITIONS = 3
TASKS = 100_000
WORKERS = 64
SECONDS = 5.0
FILES = 100
WANTED = Registration(identity=bytes(16), digest=b"", tasks=0, chunks_per_task=1, shuffle=True, seed=21)
RULES = QueueRules(passes=0)


class _Quiet:
    """A log that keeps nothing."""

    def debug(self, event: str, **fields: object) -> None:
        pass

    info = warning = error = debug


def _ignore(event: QueueEvent) -> None:
    """Nobody reads the events."""


def measure(arguments: argparse.Namespace) -> Outcome:
    repetitions = arguments.repetitions or REPETITIONS
    names = ["SQLite", "etcd"]
    if etcd_binary() is None:
        print("dispatch_store: no etcd, so only SQLite is measured (Debian: etcd-server; or P2PNODE_ETCD)")
        names.remove("etcd")
    series = []
    for name in names:
        found = [_repetition(name) for _ in range(repetitions)]

        def values(key: str, found: list[dict[str, float]] = found) -> list[float]:
            return [one[key] for one in found]

        aim = "≥ 1000" if name == "SQLite" else ""
        series += [
            Series(f"dispatches to {WORKERS} workers, {name}", "per second", values("many"), aim=aim),
            Series(f"dispatches to one worker, {name}", "per second", values("one")),
            Series(f"longest pause of the event loop, {name}", "ms", values("pause_ms")),
            Series(f"recovery of the queue, {name}", "s", values("recovery_s")),
            Series(f"memory of the queue, {name}", "MB", values("memory_mb"), details={"tasks": TASKS}),
        ]
    return Outcome(
        "dispatch_store",
        f"{TASKS:,} tasks of one chunk each in {FILES} files, shuffled; a dispatch is a hand-out and a report, each "
        "durable before its answer (SQLite: WAL with full sync; etcd: one member, its own data directory on the same "
        "disk); memory is what a recovering master's process grows by",
        series,
    )


def _repetition(name: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, _spec(name, Path(folder)) as spec:
        found = uvloop.run(_dispatch(spec, Path(folder)))
        # Another process, because memory that was given back stays with this one.
        command = [sys.executable, "-m", "benchmarks.dispatch_store", spec, folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotMeasured(f"the recovering master failed: {done.stderr[-2000:]}")
        return found | json.loads(done.stdout)


@contextmanager
def _spec(name: str, folder: Path) -> Iterator[str]:
    if name == "SQLite":
        yield "sqlite"
        return
    server = EtcdServer(folder)
    try:
        server.start()
        yield f"etcd://127.0.0.1:{server.port}/benchmark"
    finally:
        server.close()


def _queue(spec: str, folder: Path) -> StoredQueue:
    environment = Environment(
        clock=SystemClock(), entropy=SystemEntropy(), disk=FolderDisk(folder), executor=ThreadExecutor(), log=_Quiet()
    )
    return StoredQueue(open_store(spec, folder, environment), RULES, environment, _ignore)


async def _dispatch(spec: str, folder: Path) -> dict[str, float]:
    each = TASKS // FILES
    table = ChunkTable(
        DatasetChunk(f"part-{file:05d}", index, 65_000 * index, 1000) for file in range(FILES) for index in range(each)
    )
    queue = _queue(spec, folder)
    await queue.open()
    await queue.register(table, WANTED)
    await _rate(queue, WORKERS, 1.0)
    watch = asyncio.create_task(_longest_pause())
    many = await _rate(queue, WORKERS, SECONDS)
    watch.cancel()
    one = await _rate(queue, 1, SECONDS / 2)
    await queue.close()
    return {"many": many, "one": one, "pause_ms": 1000 * await watch}


async def _rate(queue: StoredQueue, workers: int, seconds: float) -> float:
    end = time.perf_counter() + seconds

    async def work(worker: bytes) -> int:
        done = 0
        while time.perf_counter() < end:
            handout = await queue.get(worker)
            if handout.answer is not Answer.TASK or handout.lease is None:
                raise NotMeasured(f"a worker was answered {handout.answer}")
            lease = handout.lease
            if await queue.finish(worker, lease.task, lease.attempt) is not ReportAnswer.ACCEPTED:
                raise NotMeasured("a report was not accepted")
            done += 1
        return done

    began = time.perf_counter()
    counts = await asyncio.gather(*(work(b"worker %d" % number) for number in range(workers)))
    return sum(counts) / (time.perf_counter() - began)


async def _longest_pause() -> float:
    longest = 0.0
    while True:
        began = time.perf_counter()
        try:
            await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            return longest
        longest = max(longest, time.perf_counter() - began - 0.001)


async def _recover(spec: str, folder: Path) -> dict[str, float]:
    before = _resident_mb()
    queue = _queue(spec, folder)
    began = time.perf_counter()
    await queue.open()
    recovery_s = time.perf_counter() - began
    if queue.status().tasks != TASKS:
        raise NotMeasured(f"{queue.status().tasks} tasks were recovered")
    found = {"recovery_s": recovery_s, "memory_mb": _resident_mb() - before}
    await queue.close()
    return found


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 1e6


if __name__ == "__main__":
    print(json.dumps(uvloop.run(_recover(sys.argv[1], Path(sys.argv[2])))))
