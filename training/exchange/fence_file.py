"""The fences of a node on its disk: the highest term seen for each shard, so that no owner of before is accepted."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from msgspec import Meta

from training.exchange.context import ExchangeContext
from training.exchange.terms import MAX_SHARDS, TERM_LIMIT, Genesis, ShardIndex, Term, TermNode, TermNumber

FENCES_FILE = "fences.msgpack"
_Rows = Annotated[dict[ShardIndex, tuple[TermNumber, TermNode]], Meta(max_length=MAX_SHARDS)]


class FenceFile:
    """Loads them, and writes them when they change."""

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        self._disk = context.environment.disk
        self._log = context.environment.log
        self._load()

    def _load(self) -> None:
        raw = self._disk.read(FENCES_FILE)
        if raw is None:
            return
        try:
            genesis, rows = msgspec.msgpack.decode(raw, type=tuple[Genesis, _Rows])
        except msgspec.DecodeError as error:
            self._log.warning("fences_unreadable", reason=str(error))
            return
        if genesis == self._context.genesis:
            for shard, (number, node) in rows.items():
                if number >= TERM_LIMIT:
                    self._log.warning("fence_passed_over", shard=shard)
                    continue
                self._context.store.ownership.raise_fence(shard, Term(number, node))

    async def run(self) -> None:
        """Write the fences when they changed, at most once a second; retried until the disk takes them.

        Fences that a crash loses in between are found again by the survey of a take-over.
        """
        failing = False
        while True:
            await asyncio.sleep(1.0)
            if (fences := self._context.store.ownership.take_unsaved_fences()) is not None:
                data = msgspec.msgpack.encode((self._context.genesis, fences))
                try:
                    await self._context.environment.executor.run(self._disk.write, FENCES_FILE, data)
                except OSError as error:
                    self._context.store.ownership.keep_unsaved_fences()
                    if not failing:
                        self._log.error("fences_not_written", reason=str(error))
                    failing = True
                else:
                    failing = False
