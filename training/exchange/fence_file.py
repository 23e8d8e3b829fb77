"""The fences of a node on its disk: the highest term seen for each shard, so that no owner of before is accepted."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pnode.overlay.environment import Environment
from p2pnode.training.exchange.store.ownership import Ownership
from p2pnode.training.exchange.terms import MAX_SHARDS, TERM_LIMIT, Genesis, ShardIndex, Term

FENCES_FILE = "fences.msgpack"
_Rows = Annotated[dict[ShardIndex, Term], Meta(max_length=MAX_SHARDS)]


class FenceFile:
    """Loads them, and writes them when they change."""

    def __init__(self, ownership: Ownership, genesis: bytes, environment: Environment) -> None:
        self._ownership = ownership
        self._genesis = genesis
        self._disk = environment.disk
        self._executor = environment.executor
        self._log = environment.log
        self._load()
        self._written = dict(ownership.fences)

    def _load(self) -> None:
        raw = self._disk.read(FENCES_FILE)
        if raw is None:
            return
        try:
            genesis, rows = msgspec.msgpack.decode(raw, type=tuple[Genesis, _Rows])
        except msgspec.DecodeError as error:
            self._log.warning("fences_unreadable", reason=str(error))
            return
        if genesis == self._genesis:
            for shard, term in rows.items():
                if term.number < TERM_LIMIT:
                    self._ownership.raise_fence(shard, term)
                else:
                    self._log.warning("fence_passed_over", shard=shard)

    async def run(self) -> None:
        """Write the fences when they changed, at most once a second; retried until the disk takes them.

        Fences that a crash loses in between are found again by the replica query of a take-over.
        """
        failing = False
        while True:
            await asyncio.sleep(1.0)
            if (fences := dict(self._ownership.fences)) == self._written:
                continue
            try:
                data = msgspec.msgpack.encode((self._genesis, fences))
                await self._executor.run(self._disk.write, FENCES_FILE, data)
            except OSError as error:
                if not failing:
                    self._log.error("fences_not_written", reason=str(error))
                failing = True
            else:
                self._written, failing = fences, False
