"""A stand-in for the daemon: the real status server over a source that pretends to learn. Started as a process.

`python tests/process/harness/fake_node.py CONFIG`: its accuracy rises by 0.1 with each evaluation, to 0.99 with the
exchange and 0.6 without. `training.options.misbehave` makes it `die` at once, `ignore` every request to end, or `fork`
a child.
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
from typing import Any

from overlay.system import FolderDisk, SystemClock
from p2pnode.client import STATUS_FILE, status_file
from p2pnode.config.load import load
from p2pnode.config.settings import Config
from p2pnode.keys import api_token
from p2pnode.status.events import EventRing
from p2pnode.status.prometheus import Family, single
from p2pnode.status.server import StatusServer

EVALUATION_S = 0.15


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
        return min(0.99 if self._config.exchange.enabled else 0.6, 0.5 + 0.1 * evaluation)

    async def learn(self) -> None:
        """One event per evaluation, for ever."""
        for evaluation in itertools.count():
            self.events.add("info", "evaluated", {"accuracy": self.accuracy(evaluation)}, wall=time.time())
            await asyncio.sleep(EVALUATION_S)

    def status(self) -> dict[str, Any]:
        evaluation = int((time.monotonic() - self._began) / EVALUATION_S)
        return {
            "summary": f"training at step {evaluation * 5} <b>& more</b>",
            "node": {"id": "ab" * 20, "incarnation": 1, "version": "0", "address": "127.0.0.1:1", "role": "peer"},
            "run": self._config.swarm.run,
            "state": "training",
            "step": evaluation * 5 + 1,
            "population": {"estimate": 2.0, "low": 2.0, "high": 2.0, "exact": True, "observations": 0},
            "barrier": {"method": self._config.barrier.method},
            "waiting": None,
            "training": {
                "loss": float("nan"),
                "metrics": {"accuracy": self.accuracy(evaluation)},
                "evaluated_step": evaluation * 5,
                "evaluated_samples": 360,
                "step_seconds": 0.1,
                "trainer": "running",
            },
            "exchange": {"shards_owned": 3, "bytes_sent": 1000 * evaluation, "bytes_received": 900, "refused": 0},
            "health": [{"level": "warning", "what": "it is a fake", "do": "nothing"}],
        }

    def peers(self) -> list[dict[str, Any]]:
        return [{"id": "cd" * 20, "address": "127.0.0.1:2", "step": 3, "lag": 1, "state": "training"}]

    def steps(self, limit: int) -> list[dict[str, Any]]:
        return [{"step": step} for step in range(1, 6)][-limit:]

    def ready(self) -> tuple[bool, str]:
        return (self._misbehave != "unready"), "it waits for nodes: have 1, need 3"

    def metrics(self) -> list[Family]:
        return [single("p2pnode_step", "gauge", "Completed steps.", 7)]

    def leave(self) -> None:
        self.requests.append("leave")
        if self._misbehave != "ignore":
            self.left.set()

    def pause(self) -> None:
        self.requests.append("pause")

    def resume(self) -> None:
        self.requests.append("resume")


async def main(path: Path) -> None:
    config = load(path).config
    misbehave = str(config.training.task.partition(":")[2])
    if misbehave == "Die":
        print("the data is missing")
        sys.exit(8)
    if misbehave == "Fork":
        await asyncio.create_subprocess_exec("sleep", "600")
    source = FakeSource(config, misbehave.lower())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, source.leave)
    disk = FolderDisk(config.state_folder)
    config.state_folder.mkdir(parents=True, exist_ok=True)
    path = api_token.token_path(config.state_folder, "").resolve()
    server = StatusServer(source, config.status, api_token.load_or_make(path, os.urandom(32)), SystemClock())
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
    asyncio.run(main(Path(sys.argv[1])))
