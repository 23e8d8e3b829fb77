"""A real daemon whose trainer waits at a gate: `python -m benchmarks.gated_daemon --config node.toml`.

Everything is `p2pnode.daemon` (sockets, TLS, disk, HTTP, signals) but the trainer. It has real shared memory, gives the
same noise as its delta at once, and begins a step on the harness's signal (`benchmarks.gate`), when the values of the
last one have arrived. So a step is its exchange and nothing else. `[training.options]`: `gate` (path of the socket),
`parameters`, `seed`, `free_steps` (steps it makes of one `go`; 1).
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.plain_trainer import PlainTrainer
from p2pnode import daemon
from p2pnode.config.load import load
from p2pnode.training.exchange.recovery.rebalancing import Rebalancer
from p2pnode.training.layout import Layout, LayoutEntry
from p2pnode.training.settings import TrainingSettings
from p2pnode.training.trainer_link.interface import (
    Ranges,
    Resume,
    StepOrder,
    StepReport,
    TrainerEnd,
    TrainerHello,
    Vector,
)
from p2pnode.training.trainer_link.shared_memory import SharedVectors

#: Small against the values, as deltas are.
DELTA_SCALE = 1e-3


class GatedTrainer(PlainTrainer):
    """Implements `training.trainer_link.interface.Trainer`. Takes whatever the daemon gives a real one, and uses the
    options."""

    def __init__(self, settings: TrainingSettings, *_: Any, **__: Any) -> None:
        options = settings.options
        self._path = str(options["gate"])
        self._total = int(options["parameters"])
        super().__init__(Layout((LayoutEntry("weight", (self._total,), "float32", "parameter", 0, self._total),)))
        self._seed = int(options.get("seed", 0))
        self._free_steps = int(options.get("free_steps", 1))
        self._left = 0
        self._began = False
        self._arrived = asyncio.Event()
        self._arrived.set()
        self._gate: socket.socket | None = None
        self.vector: Vector = np.empty(0, np.float32)
        self.delta: Vector = np.empty(0, np.float32)

    async def start(self, restore: str = "", *, resume: Resume | None = None) -> TrainerHello:  # noqa: ARG002
        await asyncio.to_thread(self._fill)
        self._gate = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._gate.setblocking(False)
        await asyncio.get_running_loop().sock_connect(self._gate, self._path)
        await self._say(f"pid {os.getpid()}")
        self.state = "running"
        return TrainerHello(self._layout, "gated", "1", "", "stub", pid=0)

    def _fill(self) -> None:
        shared = SharedVectors(self._total)
        self.vector, self.delta = shared.vector, shared.delta
        self._shared = shared
        random = np.random.default_rng(self._seed)
        self.vector[:] = random.standard_normal(self._total, np.float32)
        self.delta[:] = random.standard_normal(self._total, np.float32)
        self.delta *= np.float32(DELTA_SCALE)

    async def _say(self, line: str) -> None:
        assert self._gate is not None
        await asyncio.get_running_loop().sock_sendall(self._gate, line.encode() + b"\n")

    async def arrived(self, _step: int, *_: Ranges, **__: Ranges) -> None:
        self._arrived.set()

    async def train(self, order: StepOrder) -> StepReport:
        await self._arrived.wait()
        if not self._left:
            if self._began:
                await self._say("done")
            await self._say("ready")
            assert self._gate is not None
            if not await asyncio.get_running_loop().sock_recv(self._gate, 64):
                await asyncio.Event().wait()  # the harness has closed: the daemon is about to be ended
            self._began = True
            self._left = self._free_steps
        self._left -= 1
        self._arrived.clear()
        return StepReport(order.step, 0.0, 1, order.local_steps, 1e-3, {})

    async def stop(self, stop_s: float = 0.0) -> TrainerEnd:
        end = await super().stop(stop_s)
        if self._gate is not None:
            self._gate.close()
            self._gate = None
        return end


def main(arguments: list[str]) -> int:
    Rebalancer.tenure_s = 0.0  # the shards come to where they belong before anything is timed
    config = load(Path(arguments[arguments.index("--config") + 1]), {}, []).config
    return daemon.run(config, make_trainer=GatedTrainer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
