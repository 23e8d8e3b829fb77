"""The model's integer buffers at the end of a run: all nodes take those of the owner of the first shard."""

from __future__ import annotations

import asyncio

from overlay.transport import TransportError
from training.encoding.frames import FrameReader
from training.exchange.context import ExchangeContext
from training.exchange.directory import OwnerDirectory
from training.exchange.owner.final_values import BUFFERS_SHARD, FinalValues
from training.exchange.ownership_messages import FinalBuffers, FinalBuffersAnswer, IntegerBuffers

#: The owner compares the buffers with its backup before it answers.
TIMEOUT_S, RETRY_S = 10.0, 0.2


class BufferAgreement:
    """Finds the buffers that all nodes take."""

    def __init__(self, context: ExchangeContext, directory: OwnerDirectory, final_values: FinalValues) -> None:
        self._context = context
        self._run = context.run
        self._directory = directory
        self._final_values = final_values

    async def agree(self, mine: bytes, timeout_s: float) -> bytes | None:
        """The buffers of the first owner of the first shard that has finished. `mine` are this node's. None if that
        owner has not named them within `timeout_s`."""
        run = self._run
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if BUFFERS_SHARD in self._context.store.owned:
                        run.final_buffers = mine if run.final_buffers is None else run.final_buffers
                        found = await self._final_values.confirmed_buffers(run.step)
                    else:
                        found = await self._ask()
                    if found is not None:
                        run.final_buffers = found
                        return found
                    await asyncio.sleep(RETRY_S * self._context.jitter())
        except TimeoutError:
            return None

    async def _ask(self) -> bytes | None:
        groups, unknown = self._directory.by_owner([BUFFERS_SHARD])
        for owner, _ in groups:
            try:
                question = FinalBuffers(self._context.genesis)
                async with self._context.rpc.question(owner, "final_buffers", question, TIMEOUT_S) as answer:
                    if self._context.rpc.decoded(owner, answer.head, FinalBuffersAnswer).has_buffers:
                        reader = FrameReader(answer.body)
                        return (await self._context.rpc.record(owner, reader, BUFFERS_SHARD, IntegerBuffers)).buffers
            except TransportError as error:
                self._directory.failed(owner, error)
        await self._directory.refresh([BUFFERS_SHARD] if not groups or unknown else [])
        return None
