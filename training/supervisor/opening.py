"""What the first message of a trainer leads to: the description of its model, and the memory shared with it."""

from __future__ import annotations

from typing import cast

from p2pnode.overlay.system import ThreadExecutor
from p2pnode.training.layout import Layout
from p2pnode.training.trainer_link.engine_messages import EngineOpened
from p2pnode.training.trainer_link.interface import TrainerFailed, TrainerHello
from p2pnode.training.trainer_link.messages import Hello
from p2pnode.training.trainer_link.shared_memory import SharedVectors


def hello_of(opened: Hello | EngineOpened) -> TrainerHello:
    """The trainer as it describes itself. A script with an engine has an empty layout: it trains no model."""
    if isinstance(opened, Hello):
        return opened.hello
    return TrainerHello(
        Layout(()), f"engine {opened.kind}", "1", "", "cpu", evaluates=False, pid=opened.pid, engine=opened
    )


def checked_total(total: int) -> None:
    """Raises `TrainerFailed` for a model without values."""
    if total < 1:
        raise TrainerFailed("the model has no trainable parameter", "see requires_grad of its parameters", fatal=True)


async def allocate(total: int) -> SharedVectors:
    """The buffers for a model of so many values. Raises `TrainerFailed`."""
    checked_total(total)
    executor = ThreadExecutor(1)  # Allocating gigabytes takes seconds, and happens once.
    try:
        return cast(SharedVectors, await executor.run(SharedVectors, total))
    finally:
        executor.close()
