"""values: get and set of named values at their owners, beside Redis and Dask's `Variable`, in one run.

Three nodes on the loopback: a value of 1 KB at a remote owner, one call after the other and by many callers; a set
returns when owner and backup have it. Redis has one copy, and is Debian's `redis-server`; without it, or without Dask,
the others are measured. Then 100,000 keys over six nodes, and a seventh joins.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, NotMeasured, Outcome, Series
from benchmarks.value_node import timed

REPETITIONS = 3
SECONDS = 2.0
SIZE_BYTES = 1024
CALLERS = 64
KEYS, FILL_BYTES, NODES = 100_000, 1024, 6
#: A join is measured until its shards have come, at most this long.
REBALANCE_S = 60.0
#: Shards that have not moved for so long have their place: a table is kept for at least a second after each move.
REST_S = 4.0


def measure(arguments: argparse.Namespace) -> Outcome:
    repetitions = arguments.repetitions or REPETITIONS
    series = _ours(repetitions)
    if shutil.which("redis-server") is None:
        print("values: no redis-server, so Redis is not measured (Debian: redis-server)")
    else:
        series += _named("Redis", [_redis() for _ in range(repetitions)], aims=False)
    try:
        import distributed  # noqa: F401
    except ImportError:
        print("values: no Dask, so its Variable is not measured (pip install 'p2pnode[mapreduce]')")
    else:
        series += _named("Dask Variable", [_dask() for _ in range(repetitions)], aims=False)
    series += _many_keys()
    return Outcome(
        "values",
        f"three nodes on the loopback, 64 shards, one backup each; values of {SIZE_BYTES} bytes at owners in "
        f"another process; a set returns when owner and backup have it; one caller, and {CALLERS} in one process; "
        f"Redis without persistence or replica; {KEYS:,} keys of {FILL_BYTES} bytes over {NODES} nodes, "
        "then one more joins",
        series,
    )


class _Process:
    """One node of ours."""

    def __init__(self, folder: Path, source: str) -> None:
        command = [sys.executable, "-m", "benchmarks.value_node", str(folder), source]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self.address = self._answer()["address"]

    def ask(self, **command: Any) -> dict[str, Any]:
        self.say(**command)
        return self._answer()

    def say(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise NotMeasured("a node of the benchmark has ended")
        return dict(json.loads(line))

    answer = _answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def _swarm(count: int) -> Iterator[list[_Process]]:
    """Nodes whose shards are spread and backed up."""
    with tempfile.TemporaryDirectory(prefix="p2pnode-bench-") as folder, contextlib.ExitStack() as stack:
        nodes: list[_Process] = []
        for number in range(count):
            source = nodes[0].address if nodes else "found"
            nodes.append(_Process(Path(folder) / f"n{number}", source))
            stack.callback(nodes[-1].close)
        nodes[0].ask(do="fill", first=0, count=1, size_bytes=8)
        _settled(nodes, 60.0)
        yield nodes


def _settled(nodes: list[_Process], within_s: float) -> float:
    """Wait until every shard has an owner with a backup and no node has none, and nothing has moved for `REST_S`."""
    began_s = time.perf_counter()
    former, since_s = [], began_s
    while time.perf_counter() - began_s < within_s + REST_S:
        states = [node.ask(do="state") for node in nodes]
        owned = [int(state["owned"]) for state in states]
        is_whole = sum(owned) == sum(int(state["pairs"]) for state in states) and all(owned)
        if owned != former or not is_whole:
            former, since_s = owned, time.perf_counter()
        elif time.perf_counter() - since_s >= REST_S:
            return since_s - began_s
        time.sleep(0.1)
    raise NotMeasured(f"the shards were not spread within {within_s:g} s: {former}")


def _ours(repetitions: int) -> list[Series]:
    with _swarm(3) as nodes:
        alone = [
            nodes[1].ask(do="measure", seconds=SECONDS, size_bytes=SIZE_BYTES, callers=1) for _ in range(repetitions)
        ]
        many = [
            nodes[1].ask(do="measure", seconds=SECONDS, size_bytes=SIZE_BYTES, callers=CALLERS)
            for _ in range(repetitions)
        ]
        together = []
        for _ in range(repetitions):
            for node in nodes:
                node.say(do="measure", seconds=SECONDS, size_bytes=SIZE_BYTES, callers=CALLERS)
            answers = [node.answer() for node in nodes]
            together.append({key: statistics.mean(one[key] for one in answers) for key in answers[0]})
    found = [one | {f"many_{key}": value for key, value in more.items()} for one, more in zip(alone, many, strict=True)]
    series = _named("p2pnode", found, aims=True)
    for name in ("set", "get"):
        rates = [one[f"{name}_rate"] for one in together]
        series.append(Series(f"{name} per node, all three calling at once, p2pnode", "per second", rates))
    return series


def _named(name: str, found: list[dict[str, float]], *, aims: bool) -> list[Series]:
    series = []
    for verb in ("set", "get"):
        p50 = [one[f"{verb}_p50_ms"] for one in found]
        p99 = {"p99_ms": [one[f"{verb}_p99_ms"] for one in found]}
        series.append(Series(f"{verb} of 1 KB, median, {name}", "ms", p50, "≤ 1" if aims else "", p99))
        rates = [one[f"many_{verb}_rate"] for one in found]
        series.append(
            Series(f"{verb} of 1 KB, {CALLERS} callers, {name}", "per second", rates, "≥ 5000" if aims else "")
        )
    return series


def _many_keys() -> list[Series]:
    with _swarm(NODES) as nodes, tempfile.TemporaryDirectory(prefix="p2pnode-bench-") as folder:
        began_s = time.perf_counter()
        each = -(-KEYS // len(nodes))
        for number, node in enumerate(nodes):
            count = min(each, KEYS - number * each)
            node.say(do="fill", first=number * each, count=count, size_bytes=FILL_BYTES)
        for node in nodes:
            node.answer()
        filled_s = time.perf_counter() - began_s
        states = [node.ask(do="state") for node in nodes]
        joiner = _Process(Path(folder) / "joiner", nodes[0].address)
        try:
            rebalanced_s = _settled([*nodes, joiner], REBALANCE_S)
            after = joiner.ask(do="state")
            found = joiner.ask(do="read", count=KEYS)["found"]
        finally:
            joiner.close()
    if found != KEYS:
        raise NotMeasured(f"{found} of {KEYS} keys could be read after the join")
    label = f"{KEYS:,} keys over {NODES} nodes"
    return [
        Series(f"{label}: filling", "s", [filled_s]),
        Series(f"{label}: largest peak of memory of a node", "MB", [max(state["peak_mb"] for state in states)]),
        Series(f"{label}: largest share of the values and their backups", "MB", [max(s["held_mb"] for s in states)]),
        Series(
            f"{label}: until a node that joins has its share", "s", [rebalanced_s], "≤ 10", {"keys": [after["keys"]]}
        ),
    ]


# -- beside them ---------------------------------------------------------------------------------------------------


def _redis() -> dict[str, float]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--save", "", "--appendonly", "no", "--bind", "127.0.0.1"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return asyncio.run(_redis_calls(port))
    finally:
        server.terminate()
        server.wait()


async def _redis_calls(port: int) -> dict[str, float]:
    found: dict[str, float] = {}
    payload = b"x" * SIZE_BYTES
    for prefix, callers in (("", 1), ("many_", CALLERS)):
        lines = [await _connected(port) for _ in range(callers)]
        free = list(lines)

        async def call(*words: bytes, free: list[Any] = free) -> None:
            reader, writer = free.pop()
            writer.write(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(one), one) for one in words))
            head = await reader.readline()
            if head[:1] == b"$":
                await reader.readexactly(int(head[1:]) + 2)
            free.append((reader, writer))

        async def put(key: str, call: Any = call) -> None:
            await call(b"SET", key.encode(), payload)

        async def get(key: str, call: Any = call) -> None:
            await call(b"GET", key.encode())

        keys = [f"key-{number}" for number in range(4 * CALLERS)]
        for name, function in (("set", put), ("get", get)):
            rate, times = await timed(function, keys, SECONDS, callers)
            found |= _summary(f"{prefix}{name}", rate, times)
        for _, writer in lines:
            writer.close()
    return found


async def _connected(port: int) -> Any:
    for _ in range(200):
        try:
            return await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
    raise NotMeasured("redis-server does not answer")


def _summary(name: str, rate: float, times: list[float]) -> dict[str, float]:
    return {
        f"{name}_rate": rate,
        f"{name}_p50_ms": 1000 * statistics.median(times),
        f"{name}_p99_ms": 1000 * sorted(times)[int(0.99 * len(times))],
    }


def _dask() -> dict[str, float]:
    from distributed import Client, LocalCluster

    with LocalCluster(n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        address = cluster.scheduler_address

        async def calls() -> dict[str, float]:
            from distributed import Variable

            found: dict[str, float] = {}
            async with Client(address, asynchronous=True) as client:
                payload = b"x" * SIZE_BYTES
                for prefix, callers in (("", 1), ("many_", CALLERS)):
                    names = [f"key-{number}" for number in range(4 * callers)]
                    variables = {name: Variable(name, client=client) for name in names}

                    async def put(key: str, variables: Any = variables) -> None:
                        await variables[key].set(payload)

                    async def get(key: str, variables: Any = variables) -> None:
                        await variables[key].get()

                    for name, function in (("set", put), ("get", get)):
                        if name == "get":
                            for key in names:
                                await put(key)
                        rate, times = await timed(function, names, SECONDS, callers)
                        found |= _summary(f"{prefix}{name}", rate, times)
            return found

        return asyncio.run(calls())
