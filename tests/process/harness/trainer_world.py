"""Shared by the tests of the trainer process: a log that keeps its events, trainers of small tasks, waiting."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from p2pnode.overlay.system import SystemClock
from p2pnode.training.settings import TrainingSettings
from p2pnode.training.supervisor.launch import NodeStart
from p2pnode.training.supervisor.process_trainer import ProcessTrainer
from p2pnode.training.supervisor.silence import HANG_S
from tests.process.harness.forked_python import ForkServer, trainers_are_forks, with_torch


class QuietLog:
    """Keeps `(level, event, fields)`."""

    def __init__(self) -> None:
        self.records: list[tuple[str, str, dict[str, Any]]] = []

    def debug(self, event: str, **fields: Any) -> None:
        self.records.append(("debug", event, fields))

    def info(self, event: str, **fields: Any) -> None:
        self.records.append(("info", event, fields))

    def warning(self, event: str, **fields: Any) -> None:
        self.records.append(("warning", event, fields))

    def error(self, event: str, **fields: Any) -> None:
        self.records.append(("error", event, fields))

    def fields(self, event: str) -> list[dict[str, Any]]:
        return [fields for _, name, fields in self.records if name == event]


class World:
    """Creates trainers, and ends all of them after a test. Their processes are forks of `server`, by default one that
    has imported torch (`tests.process.harness.forked_python`), unless `starts_python`."""

    def __init__(
        self, state_dir: Path, *, starts_python: bool = False, server: Callable[[], ForkServer] = with_torch
    ) -> None:
        self.state_dir = state_dir
        self.starts_python = starts_python
        self.server = server
        self.log = QuietLog()
        self.states: list[str] = []
        self.trainers: list[ProcessTrainer] = []

    def trainer(
        self, kind: str = "Plain", *, command: list[str] | None = None, hang_s: float = HANG_S, **settings: Any
    ) -> ProcessTrainer:
        settings.setdefault("threads", 1)
        settings.setdefault("task", f"tests.harness.trainers.tasks:{kind}")
        trainer = ProcessTrainer(
            TrainingSettings(**settings),
            command=command,
            node=NodeStart(b"n" * 20, 1),
            state_dir=self.state_dir,
            log=self.log,
            clock=SystemClock(),
            on_state=self.states.append,
            hang_s=hang_s,
        )
        self.trainers.append(trainer)
        return trainer

    def script(self, text: str, **settings: Any) -> ProcessTrainer:
        """A trainer whose command is a Python script of the user's own, in a folder of its own."""
        folder = self.state_dir / "users"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.py").write_text(text)
        return self.trainer(command=[sys.executable, str(folder / "train.py")], **settings)

    async def end(self) -> None:
        for trainer in self.trainers:
            await trainer.stop()

    def run(self, scenario: Callable[[World], Any], *, uvloop: bool = False) -> Any:
        async def with_end() -> Any:
            with contextlib.nullcontext() if self.starts_python else trainers_are_forks(server=self.server):
                try:
                    return await scenario(self)
                finally:
                    await self.end()

        if uvloop:
            import uvloop as fast

            return fast.run(with_end())
        return asyncio.run(with_end())


async def add(trainer: ProcessTrainer, step: int) -> None:
    """Add the delta to the vector, as the owner of all would, and let the value enter."""
    trainer.vector += trainer.delta
    trainer.encoded()
    await trainer.arrived(step)


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


def wait_until(holds: Callable[[], bool], deadline_s: float) -> bool:
    """Whether it held before the deadline."""
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        if holds():
            return True
        time.sleep(0.02)
    return holds()


async def until(holds: Callable[[], bool], deadline_s: float = 60.0) -> None:
    """Wait until it holds. Raises `TimeoutError` after the deadline."""
    async with asyncio.timeout(deadline_s):
        while not holds():  # noqa: ASYNC110 - what is waited for happens in another process
            await asyncio.sleep(0.02)


def descriptors() -> int:
    """Open file descriptors of this process, after a garbage collection."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))
