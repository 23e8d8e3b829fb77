"""What the trainers of benchmarks have in common: no process, no script, no evaluation, no state of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from p2pnode.training.layout import Layout
from p2pnode.training.trainer_link.data_messages import DataFromDaemon, DataFromTrainer
from p2pnode.training.trainer_link.engine_messages import EngineAsked, PullDone
from p2pnode.training.trainer_link.interface import (
    BusyWith,
    Evaluation,
    ModelDescription,
    Ranges,
    TensorSource,
    TrainerEnd,
    TrainerFailed,
)


class PlainTrainer:
    """Implements the rest of `training.trainer_link.interface.Trainer`, for a vector that `layout` describes."""

    def __init__(self, layout: Layout) -> None:
        self.state = "stopped"
        self.is_script = False
        self.busy: BusyWith | None = None
        self.findings: list[tuple[str, str]] = []
        self._layout = layout

    def encoded(self) -> None:
        """Every delta is the same."""

    async def arrived(
        self, step: int, keeps_base: Ranges = (), takes_back: Ranges = (), adds_delta: Ranges = ()
    ) -> None:
        """It looks at no values."""

    async def evaluate(self, step: int) -> Evaluation | None:  # noqa: ARG002
        return None

    async def save(self, path: str) -> Awaitable[None]:  # noqa: ARG002
        """Nothing to save."""
        return asyncio.sleep(0)

    async def describe(self, folder: str, *, wait: bool = False) -> ModelDescription:  # noqa: ARG002
        tensors = (
            TensorSource(entry.name, entry.dtype, entry.shape, "vector", entry.name) for entry in self._layout.entries
        )
        return ModelDescription(self._layout.digest(), "", tuple(tensors), {})

    def take_measured(self) -> list[Evaluation]:
        return []

    def on_data(self, handler: Callable[[DataFromTrainer], None]) -> None:
        """It shares no data."""

    def send_data(self, message: DataFromDaemon) -> None:
        """It shares no data."""

    def on_engine(self, handler: Callable[[EngineAsked | PullDone], None]) -> None:
        """It uses no engine."""

    async def ended(self) -> TrainerFailed:
        """It ends when it is told to."""
        return await asyncio.get_running_loop().create_future()

    async def finish(self, reason: str, finish_s: float) -> TrainerEnd:  # noqa: ARG002
        return await self.stop(finish_s)

    async def stop(self, stop_s: float = 0.0) -> TrainerEnd:  # noqa: ARG002
        self.state = "stopped"
        return TrainerEnd()
