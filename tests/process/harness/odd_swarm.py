"""A few real daemons whose trainers sleep, and whose memory can be broken (`tests.process.harness.odd_daemon`)."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.daemons import Daemon, Daemons, acknowledged_steps, status, wait_until
from p2pnode.training.settings import BarrierSettings, ExchangeSettings, TrainingSettings
from tests.process.harness.free_port import free_port

MEAN_S = 0.25
SHARDS = 4
START_S = 120.0


class OddSwarm:
    """Daemons on loopback; all steps are about `MEAN_S` long."""

    def __init__(self, folder: Path) -> None:
        self._daemons = Daemons(folder)
        self.nodes: list[Daemon] = []

    def start(self, count: int) -> None:
        """Start so many; returns when all have made a few steps."""
        for number in range(count):
            options = {"number": number, "seed": 7, "mean_s": MEAN_S}
            bootstrap = self.nodes[0].listens_at if self.nodes else ""
            self.nodes.append(
                self._daemons.start(
                    TrainingSettings(checkpoint_s=5.0, eval_steps=0, options=options),
                    bootstrap=bootstrap,
                    command=("tests.process.harness.odd_daemon",),
                    barrier=BarrierSettings(method="pbsp"),
                    exchange=ExchangeSettings(shards=SHARDS),
                    port=free_port(),
                )
            )
            if number == 0:
                wait_until(self.nodes[0], lambda found: int(found["step"]) >= 1, what="training", within_s=START_S)
        for node in self.nodes:
            wait_until(node, lambda found: int(found["step"]) >= 5, what="training", within_s=START_S)

    def signal(self, node: Daemon, number: signal.Signals) -> None:
        os.kill(node.pid, number)

    def steps(self, nodes: list[Daemon]) -> list[int]:
        """Acknowledged steps."""
        return [acknowledged_steps(status(node) or {}) for node in nodes]

    def rate(self, nodes: list[Daemon], seconds: float) -> float:
        """Steps a second and node, over so long."""
        began_s, before = time.monotonic(), self.steps(nodes)
        time.sleep(seconds)
        made = [now - former for now, former in zip(self.steps(nodes), before, strict=True)]
        return sum(made) / len(made) / (time.monotonic() - began_s)

    def events(self, node: Daemon, name: str) -> list[dict[str, Any]]:
        """The fields of the events of this name."""
        assert node.client is not None
        found = node.client.events(0)["events"]
        return [dict(one["fields"]) for one in found if one["event"] == name]

    def end(self, *nodes: Daemon) -> None:
        self._daemons.end(*nodes)


@contextmanager
def odd_swarm(folder: Path) -> Iterator[OddSwarm]:
    swarm = OddSwarm(folder)
    try:
        yield swarm
    finally:
        swarm.end()


def described(found: dict[str, Any]) -> str:
    """A status, for the message of a test that fails."""
    return json.dumps({key: found.get(key) for key in ("step", "summary", "exchange")}, default=str)
