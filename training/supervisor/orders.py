"""What a trainer was asked for and has not answered: an order, files that it writes beside its training, and values
that are to enter its model.

At most one order is under way. Every order carries a turn, which its answer repeats: answers to orders that were
cancelled are dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.interface import TrainerFailed


class PendingOrders:
    """Of one trainer, over all its processes. A future that fails raises `TrainerFailed`."""

    def __init__(self) -> None:
        #: Of the last order.
        self.turn = 0
        self._reply: asyncio.Future[Any] | None = None
        self._files: dict[int, asyncio.Future[None]] = {}
        self._entered: asyncio.Future[None] | None = None

    def expect(self) -> asyncio.Future[Any]:
        """The trainer is asked for something; the future has its answer."""
        self._reply = asyncio.get_running_loop().create_future()
        return self._reply

    def begin(self, order: Callable[[int], messages.Order]) -> tuple[messages.Order, asyncio.Future[Any]]:
        """The next order, and its answer."""
        self.turn += 1
        message = order(self.turn)
        if isinstance(message, messages.Save):
            self._files = {turn: file for turn, file in self._files.items() if not file.done()}
            self._files[self.turn] = asyncio.get_running_loop().create_future()
        return message, self.expect()

    def forget(self) -> None:
        """The caller no longer waits for the order."""
        self._reply = None

    def awaits(self, turn: int) -> bool:
        """Whether the order of this turn is under way, and was not cancelled."""
        return self._reply is not None and not self._reply.done() and turn == self.turn

    def file(self, turn: int) -> asyncio.Future[None]:
        """A future that is done when the file of an order to save is written."""
        return self._files[turn]

    def unwritten(self) -> list[asyncio.Future[None]]:
        """The files that are not written yet."""
        return [file for file in self._files.values() if not file.done()]

    def enter(self) -> asyncio.Future[None]:
        """Values are sent; the future is done when the model has moved to them, or its process has ended."""
        self._entered = asyncio.get_running_loop().create_future()
        return self._entered

    # -- what comes of them --------------------------------------------------------------------------------------

    def answer(self, answer: object) -> None:
        """This is what was asked for."""
        _settle(self._reply, answer)

    def written(self, turn: int) -> None:
        """The file of an order to save is in place."""
        _settle(self._files.get(turn), None)

    def not_written(self, turn: int, failure: TrainerFailed) -> None:
        """The file of an order cannot be written."""
        _fail(self._files.get(turn), failure)
        if self.awaits(turn):
            _fail(self._reply, failure)

    def entered(self) -> None:
        """The values have entered."""
        _settle(self._entered, None)

    def fail_order(self, failure: TrainerFailed) -> None:
        """The order under way will not be answered."""
        _fail(self._reply, failure)

    def fail(self, failure: TrainerFailed) -> None:
        """The process has ended."""
        for pending in (self._reply, *self._files.values()):
            _fail(pending, failure)
        self.entered()


def _settle(pending: asyncio.Future[Any] | None, result: object) -> None:
    if pending is not None and not pending.done():
        pending.set_result(result)


def _fail(pending: asyncio.Future[Any] | None, failure: TrainerFailed) -> None:
    if pending is not None and not pending.done():
        pending.set_exception(failure)
        pending.exception()  # Marks the exception as retrieved: perhaps no task waits for it.
