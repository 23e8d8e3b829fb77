"""One node of the benchmark `values`: `python -m benchmarks.value_node FOLDER [found | ADDRESS]`.

Overlay, sockets and exchange are those of a daemon, in a run without a model. Each line of its input is a command as
JSON, answered by a line.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.identity import load_identity, next_incarnation
from p2pnode.overlay.overlay import Overlay
from p2pnode.overlay.peers import Activity
from p2pnode.overlay.settings import LivenessSettings, NodeSettings, OverlaySettings, SwarmSettings
from p2pnode.overlay.sockets.transport import SocketTransport
from p2pnode.overlay.system import FolderDisk, SystemClock, SystemEntropy, ThreadExecutor
from p2pnode.own_memory import trim_heap
from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.layout import Layout
from p2pnode.training.manifest import PROTOCOL, Manifest
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shard_count import shard_count
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.values.client import shard_of
from p2pnode.training.values.encoding import encode_key
from p2pnode.training.values.store import ValueUpdate
from tests.harness.environment.simulated import NoLog
from tests.harness.swarms.decoded_values import DecodedValues

SETTINGS = ExchangeSettings()


class ValueNode:
    """Overlay and exchange of one node."""

    def __init__(self, folder: Path) -> None:
        clock, entropy, log = SystemClock(), SystemEntropy(), NoLog()
        disk = FolderDisk(folder)
        environment = Environment(clock=clock, entropy=entropy, disk=disk, executor=ThreadExecutor(), log=log)
        self.incarnation = next_incarnation(disk, clock.wall())
        self.environment = environment
        self.overlay = Overlay(
            identity=load_identity(disk, entropy),
            incarnation=self.incarnation,
            boot_id=int.from_bytes(entropy.token(4), "big"),
            settings=OverlaySettings(
                NodeSettings(host="127.0.0.1", port=0), SwarmSettings(run="benchmark"), LivenessSettings()
            ),
            transport=SocketTransport("127.0.0.1", 0, log=log, clock=clock),
            environment=environment,
        )
        self.exchange: Exchange | None = None

    async def start(self, source: str) -> None:
        """Found the swarm, or join it at an address."""
        overlay = self.overlay
        overlay.set_willing(False)
        await overlay.start()
        if source == "found":
            overlay.found(os.urandom(16))
        else:
            await overlay.join([source], genesis=None)
        assert overlay.genesis is not None
        rule = Rule(SETTINGS.outer_lr, SETTINGS.outer_momentum, "")
        manifest = Manifest(
            protocol=PROTOCOL,
            run="benchmark",
            genesis=overlay.genesis.hex(),
            task="values",
            task_version="1",
            layout=Layout(()),
            frozen_digest="",
            shards=shard_count(0),
            rule=rule,
            weight=SETTINGS.weight,
            replicas=SETTINGS.replicas,
            local_steps=1,
            barrier_family="relaxed",
            max_steps=0,
            until="",
        )
        self.exchange = exchange = Exchange(
            swarm=overlay,
            manifest=manifest,
            settings=SETTINGS,
            staleness=None,
            replica=np.zeros(0, np.float32),
            incarnation=self.incarnation,
            environment=self.environment,
        )
        await exchange.start()
        if source == "found":
            await exchange.found()
        else:
            (member, *_) = overlay.members()
            await exchange.join(member.contact)
        overlay.set_willing(True)
        overlay.announce(activity=Activity.TRAINING)

    async def stop(self) -> None:
        if self.exchange is not None:
            await self.exchange.stop()
        await self.overlay.stop()

    # -- commands -----------------------------------------------------------------------------------------------

    def remote_keys(self, count: int) -> list[str]:
        """Keys whose owner is another node."""
        assert self.exchange is not None
        store, found, number = self.exchange.store, [], 0
        while len(found) < count:
            key = f"remote-{self.incarnation}-{number}"
            if shard_of(encode_key(key), len(store)) not in store.owned:
                found.append(key)
            number += 1
        return found

    async def measure(self, seconds: float, size_bytes: int, callers: int) -> dict[str, float]:
        """Sets and then gets of values at other nodes, each call by itself, by so many callers."""
        assert self.exchange is not None
        values = DecodedValues(self.exchange.values)
        keys = self.remote_keys(max(64, 4 * callers))
        value = np.zeros(size_bytes // 8)

        async def put(key: str) -> None:
            await values.set(key, value, 1)

        async def get(key: str) -> None:
            assert (await values.get(key)) is not None

        for key in keys:
            await put(key)
        found = {}
        for name, call in (("set", put), ("get", get)):
            rate, times = await timed(call, keys, seconds, callers)
            found[f"{name}_rate"] = rate
            found[f"{name}_p50_ms"] = 1000 * statistics.median(times)
            found[f"{name}_p99_ms"] = 1000 * sorted(times)[int(0.99 * len(times))]
        return found

    async def fill(self, first: int, count: int, size_bytes: int) -> dict[str, float]:
        """Set so many keys, a thousand in a call."""
        assert self.exchange is not None
        began_s = time.perf_counter()
        value = np.zeros(size_bytes // 8)
        for start in range(first, first + count, 1000):
            keys = range(start, min(start + 1000, first + count))
            await DecodedValues(self.exchange.values).update(
                [ValueUpdate(f"key-{one}", value, 1, "replace") for one in keys]
            )
        return {"seconds": time.perf_counter() - began_s}

    async def read(self, count: int) -> dict[str, int]:
        """How many of the keys that `fill` sets can be read."""
        assert self.exchange is not None
        found = 0
        for start in range(0, count, 2000):
            wanted = [f"key-{one}" for one in range(start, min(start + 2000, count))]
            found += len(await DecodedValues(self.exchange.values).get_many(wanted))
        return {"found": found}

    def state(self) -> dict[str, float]:
        """What this node holds."""
        assert self.exchange is not None
        store = self.exchange.store
        pairs = sum(owned.backup is not None and owned.learner is None for owned in store.owned.values())
        entries = sum(len(one.state.table.entries) for one in store.owned.values() if one.state.table is not None)
        return {
            "owned": len(store.owned),
            "pairs": pairs,
            "backed": len(store.backed),
            "keys": entries,
            "held_mb": store.size_bytes / 1e6,
            "resident_mb": resident_mb(),
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        }


def resident_mb() -> float:
    """Resident memory of this process now."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize() / 1e6


async def timed(
    call: Callable[[str], Awaitable[None]], keys: list[str], seconds: float, callers: int
) -> tuple[float, list[float]]:
    """Calls per second, and how long each took in seconds."""
    times: list[float] = []
    ends_s = time.perf_counter() + seconds

    async def caller(number: int) -> None:
        place = number
        while (began_s := time.perf_counter()) < ends_s:
            await call(keys[place % len(keys)])
            times.append(time.perf_counter() - began_s)
            place += callers

    await asyncio.gather(*(caller(number) for number in range(callers)))
    return len(times) / seconds, times


async def _main(folder: Path, source: str) -> None:
    node = ValueNode(folder)
    await node.start(source)
    trim_heap()  # as a daemon does: imported modules are not collected again and again
    print(json.dumps({"address": str(node.overlay.address)}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command: dict[str, Any] = json.loads(line)
        answer: Any
        match command.pop("do"):
            case "measure":
                answer = await node.measure(**command)
            case "fill":
                answer = await node.fill(**command)
            case "read":
                answer = await node.read(**command)
            case _:
                answer = node.state()
        print(json.dumps(answer), flush=True)
    await node.stop()


if __name__ == "__main__":
    uvloop.run(_main(Path(sys.argv[1]), sys.argv[2]))
