"""Compares what a node was told when it started with what the next members say that it meets.

Through one member a node can be told anything: terms that no history explains, owners that own nothing, values of
nobody. As soon as it knows others it asks them who owns the shards, `ENOUGH` of them, also while it still waits for its
vector. Terms that most of them contradict are forgotten, with all that came under them (`TermReports`). A node that
knew one member only when it started pulls every shard anew once two others have answered.
"""

from __future__ import annotations

import asyncio

from overlay.peers import Contact
from training.exchange.context import ExchangeContext
from training.exchange.directory import OwnerDirectory
from training.exchange.store.false_terms import forget_terms_above
from training.exchange.store.replica import NO_POSITION

#: Other members that are asked, and how often this node looks for one that it has not asked yet.
ENOUGH, INTERVAL_S = 3, 1.0


class StartComparison:
    """The questions of one node."""

    def __init__(self, context: ExchangeContext, directory: OwnerDirectory) -> None:
        self._context = context
        self._directory = directory
        self._store = context.store
        self._replica = context.replica
        #: The member through which the node started, and whether it knew no other then.
        self._source = b""
        self._knew_one = False
        self._asked: dict[bytes, None] = {}

    def begin(self, source: Contact) -> None:
        """This node has asked a first member."""
        self._source = source.node_id
        self._knew_one = len(self._context.swarm.members()) <= 1

    async def run(self) -> None:
        """Ask other members until enough have answered."""
        while len(self._asked) < ENOUGH:
            await asyncio.sleep(INTERVAL_S)
            for contact in self._next():
                if await self._directory.compare(contact):
                    self._asked[contact.node_id] = None
            self._take_back()
            if self._knew_one and len(self._asked) >= 2:
                self._knew_one = False
                self._pull_anew()

    def _next(self) -> list[Contact]:
        """Members that were not asked yet."""
        context = self._context
        trusted = [peer.contact for peer in context.swarm.members() if peer.node_id in context.view.trust]
        others = [one for one in trusted if one.node_id != self._source and one.node_id not in self._asked]
        return context.environment.entropy.random.sample(others, min(len(others), ENOUGH - len(self._asked)))

    def _take_back(self) -> None:
        context, ownership = self._context, self._store.ownership
        limit = context.reports.highest_explained(ownership.highest)
        if limit is None:
            return
        was = ownership.highest
        shards = forget_terms_above(self._store, self._replica, limit)
        context.environment.log.warning("terms_taken_back", shards=len(shards), was=was)
        self._asked.clear()  # what they have said was refused: now it counts
        context.view.invalidate()
        context.rebalance.wake()

    def _pull_anew(self) -> None:
        """The next pull brings every shard, whatever version this node was told it has. Published values are compared
        by their digests anyway."""
        for shard in range(len(self._store)):
            if shard not in self._store.owned and self._replica.position_of(shard) == NO_POSITION:
                self._replica.doubt(shard)
