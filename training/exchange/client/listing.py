"""Asks the owners which deltas the pulled values of this node have, for its next checkpoint."""

from __future__ import annotations

import asyncio
import contextlib

from overlay.peers import Contact
from overlay.transport import TransportError
from training.exchange.context import ExchangeContext
from training.exchange.directory import OwnerDirectory
from training.exchange.ownership_messages import ListDeltas, ListedDeltas, set_of
from training.exchange.terms import Term
from training.shards.applied import Applied

#: A checkpoint waits no longer for the answers; without one, a restart knows only how many deltas a value has.
LIST_TIMEOUT_S = 2.0


class DeltaLister:
    """The questions of one node."""

    def __init__(self, context: ExchangeContext, directory: OwnerDirectory) -> None:
        self._context = context
        self._store = context.store
        self._directory = directory

    async def deltas_of(self, versions: list[tuple[Term, int]]) -> dict[int, Applied]:
        """The deltas of each pulled value whose owner knows them; `versions` has the term and version of each shard, 0
        for one that was never pulled, or is in doubt.

        Ask soon: an owner knows the order of its last deltas only.
        """
        found: dict[int, Applied] = {}
        for shard, owned in self._store.owned.items():
            if versions[shard][1] and (known := owned.listed_at(*versions[shard])) is not None:
                found[shard] = known
        pulled = (shard for shard, (_, version) in enumerate(versions) if version and shard not in found)
        groups, _ = self._directory.by_owner(pulled)

        async def ask(owner: Contact, shards: list[int]) -> None:
            while shards:
                asked = [(shard, *versions[shard][0], versions[shard][1]) for shard in shards]
                message = ListDeltas(self._context.genesis, asked)
                try:
                    answer = await self._context.rpc.ask(owner, "list", message, ListedDeltas, LIST_TIMEOUT_S)
                except TransportError:
                    return  # or a node of an earlier version, which does not know the question
                forgotten = dict(answer.forgotten)
                told = {shard: set_of(rows, forgotten.get(shard)) for shard, rows in answer.listed if shard in shards}
                found.update(told)
                # The answer may have been full. One that lists nothing knows nothing more.
                shards = [shard for shard in shards if shard > max(told)] if told and answer.is_full else []

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LIST_TIMEOUT_S):
                await asyncio.gather(*(ask(owner, shards) for owner, shards in groups))
        return found
