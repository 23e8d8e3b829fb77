"""A substitute for the daemon: the real status server over a source that pretends to learn. Started as a process.

`python -m tests.process.harness.fake_node start --config FILE [--set KEY=VALUE]…`: its accuracy rises by 0.1 with each
evaluation, to 0.99. The task `fake:Die` makes it die at once, `fake:Ignore` ignore every request to end, and
`fake:Unable` end at 0.6.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from p2pnode.client import STATUS_FILE, status_file
from p2pnode.config.load import Override, load
from p2pnode.config.settings import Config
from p2pnode.keys import api_token
from p2pnode.overlay.report import OverlayReport, ReachabilityReport, SamplingReport
from p2pnode.overlay.system import FolderDisk, SystemClock
from p2pnode.status import SCHEMA
from p2pnode.status.events import EventRing
from p2pnode.status.prometheus import Family, gauge
from p2pnode.status.schema import (
    BarrierStatus,
    ExchangeStatus,
    Finding,
    LoopStatus,
    MemoryStatus,
    NodeStatus,
    PeerStatus,
    PopulationStatus,
    Status,
    SwarmStatus,
    TrainingStatus,
)
from p2pnode.status.server import StatusServer
from p2pnode.training.progress import StepRow

EVALUATION_S = 0.15
STATUS = Status(
    schema=SCHEMA,
    summary="",
    node=NodeStatus(
        id="ab" * 20,
        incarnation=1,
        version="0",
        address="127.0.0.1:1",
        role="peer",
        client_only=False,
        eligible=True,
        uptime_seconds=1.0,
    ),
    run="",
    swarm=SwarmStatus(closed=False, keys=[]),
    state="training",
    step=1,
    population=PopulationStatus(
        estimate=2.0, low=2.0, high=2.0, exact=True, observations=0, zone_estimate=None, workers=2.0
    ),
    barrier=BarrierStatus(method="asp", sample=0, staleness=None, quantile=1.0, queries=0),
    waiting=None,
    training=TrainingStatus(
        loss=float("nan"),
        metrics={},
        evaluated_step=0,
        evaluated_samples=360,
        optimizer_steps=0,
        samples=0,
        step_seconds=0.1,
        trainer="running",
        trainer_failures=0,
    ),
    result=None,
    exchange=ExchangeStatus(arithmetic="numpy", shards_owned=3, bytes_received=900),
    memory=MemoryStatus(budget_bytes=None, parts={}, available_bytes=None),
    overlay=OverlayReport(
        counters={"datagrams_in": 1},
        socket={},
        peers=1,
        calls_waiting=0,
        contacts=1,
        suspects=0,
        lost=0,
        sampling=SamplingReport(0, 0, None),
        lookup=None,
        local_health=0,
        round_trip_ms=None,
        reachable=ReachabilityReport(reached=True, reason="", confirmed_by=[]),
        mapping=None,
    ).flat(),
    loop=LoopStatus(delay_ms_p50=None, delay_ms_p99=None, delay_ms_max=None, tasks=1),
    health=[Finding(level="warning", what="it is a fake", do="nothing")],
)
PEER = PeerStatus(
    id="cd" * 20,
    address="127.0.0.1:2",
    step=3,
    lag=1,
    state="training",
    round_trip_ms=None,
    last_seen_seconds=0.1,
    incarnation=1,
    step_seconds=0.1,
    eligible=True,
)


class FakeSource:
    """Every answer is a function of the time since the start."""

    def __init__(self, config: Config, misbehave: str = "") -> None:
        self.events = EventRing()
        self.requests: list[str] = []
        self.left = asyncio.Event()
        self._config = config
        self._misbehave = misbehave
        self._began = time.monotonic()

    def accuracy(self, evaluation: int) -> float:
        return min(0.6 if self._misbehave == "unable" else 0.99, 0.5 + 0.1 * evaluation)

    async def learn(self) -> None:
        """One event per evaluation, until cancelled."""
        for evaluation in itertools.count():
            self.events.add("info", "evaluated", {"accuracy": self.accuracy(evaluation)}, wall=time.time())
            await asyncio.sleep(EVALUATION_S)

    def status(self) -> Status:
        evaluation = int((time.monotonic() - self._began) / EVALUATION_S)
        return msgspec.structs.replace(
            STATUS,
            summary=f"training at step {evaluation * 5} <b>& more</b>",
            run=self._config.swarm.run,
            step=evaluation * 5 + 1,
            barrier=msgspec.structs.replace(STATUS.barrier, method=self._config.barrier.method),
            training=msgspec.structs.replace(
                STATUS.training,
                metrics={"accuracy": self.accuracy(evaluation)},
                evaluated_step=evaluation * 5,
            ),
            exchange=msgspec.structs.replace(STATUS.exchange, bytes_sent=1000 * evaluation),
        )

    def peers(self) -> list[PeerStatus]:
        return [PEER]

    def steps(self, limit: int) -> list[StepRow]:
        rows: list[StepRow] = [{"step": step} for step in range(1, 6)]
        return rows[-limit:]

    def ready(self) -> tuple[bool, str]:
        return (self._misbehave != "unready"), "it waits for nodes: have 1, need 3"

    def metrics(self) -> list[Family]:
        return [gauge("p2pnode_step", "Completed steps.", 7)]

    def leave(self) -> None:
        self.requests.append("leave")
        if self._misbehave != "ignore":
            self.left.set()

    def pause(self) -> None:
        self.requests.append("pause")

    def resume(self) -> None:
        self.requests.append("resume")


async def main(path: Path, settings: list[str]) -> None:
    config = load(path, overrides=[Override(*setting.split("=", 1), "--set") for setting in settings]).config
    misbehave = str(config.training.task.partition(":")[2])
    if misbehave == "Die":
        print("the data is missing")
        sys.exit(8)
    source = FakeSource(config, misbehave.lower())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, source.leave)
    disk = FolderDisk(config.state_folder)
    config.state_folder.mkdir(parents=True, exist_ok=True)
    path = api_token.token_path(config.state_folder, "").resolve()
    server = StatusServer(source, config.status, api_token.load_or_create(path, os.urandom(32)), SystemClock())
    address = await server.start()
    disk.write(STATUS_FILE, status_file(str(address), os.getpid(), "ab" * 20, str(path)))
    learning = asyncio.create_task(source.learn())
    try:
        await source.left.wait()
    finally:
        learning.cancel()
        with contextlib.suppress(OSError):
            disk.remove(STATUS_FILE)
        await server.stop()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[3]), sys.argv[5::2]))
