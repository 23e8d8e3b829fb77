"""Carries the handshake of one overlapping turn between the step loop and the trainer process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from training.trainer_link import messages
from training.trainer_link.handshake import BufferHandshake
from training.trainer_link.interface import StepOrder


class HandshakeLink:
    """Belongs to one order to train; without a handshake it does nothing. `send` reaches the trainer process."""

    def __init__(self, handshake: BufferHandshake | None, send: Callable[[messages.DeltaTaken], None]) -> None:
        self._handshake = handshake
        self._send = send
        self._turn = 0
        self._telling: asyncio.Task[None] | None = None

    def order(self, turn: int, order: StepOrder) -> messages.Train:
        """The message with the order, which is about to be sent; `DeltaTaken` follows it."""
        self._turn = turn
        if self._handshake is not None:
            self._telling = asyncio.create_task(self._tell(self._handshake), name="tell-delta-taken")
        return messages.Train(turn, order)

    async def _tell(self, handshake: BufferHandshake) -> None:
        await handshake.delta_taken.wait()
        self._send(messages.DeltaTaken(self._turn))

    def on_loaded(self, turn: int) -> None:
        """The trainer has loaded both buffers for this turn."""
        if self._handshake is not None and turn == self._turn:
            self._handshake.loaded.set()

    def end(self) -> None:
        """The turn has its answer, or will have none: the trainer does not read the buffers any more."""
        if self._handshake is not None:
            self._handshake.loaded.set()
        if self._telling is not None:
            self._telling.cancel()
