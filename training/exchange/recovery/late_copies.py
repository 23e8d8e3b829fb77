"""What a node knows of the time before its swarm was started again without it, and what becomes of it.

The swarm has gone on with the best copies that it found. A node that comes later may have recorded deltas that those
copies lack. It sends the owners what it has recorded, once, and they report what is lost. A state of its disk that the
swarm cannot use any more is kept in a file, so that no value is thrown away by a program.
"""

from __future__ import annotations

from overlay.peers import Contact
from overlay.transport import TransportError
from training.exchange.context import ExchangeContext
from training.exchange.cooperative import VALUES_PER_ROW, off_loop
from training.exchange.directory import QUESTION_TIMEOUT_S, OwnerDirectory
from training.exchange.ownership_messages import MAX_ROWS, Offer, OwnedHistories
from training.exchange.store import state_files
from training.exchange.store.losses import named, recorded_deltas, spans, write_off
from training.exchange.store.repair_log import Span, SupersededCopy, to_mend
from training.exchange.terms import generation_of
from training.shards.applied import Applied

#: One file per shard, replaced by that of a later restart.
KEPT_FILE = "late-copies/shard-{shard:06d}.bin"
REPORT_INTERVAL_S = 0.5


class LateCopies:
    """Sends what this node has recorded, and counts what others send."""

    def __init__(self, context: ExchangeContext, directory: OwnerDirectory) -> None:
        self._context = context
        self._store = context.store
        self._rpc = context.rpc
        self._clock = context.environment.clock
        self._log = context.environment.log
        self._directory = directory
        self._recorded = Applied()
        #: Shards whose owners have not been told.
        self._untold: dict[int, None] = {}
        self._told_s = 0.0

    def take_from(self, former: LateCopies, factor: int) -> None:
        """Go on after another one, whose shards were divided into so many parts each."""
        self._recorded = former._recorded
        self._untold = {factor * shard + part: None for shard in former._untold for part in range(factor)}

    # -- the node that comes late -------------------------------------------------------------------------------

    def remember(self) -> None:
        """Called before this node settles: if the swarm was started again without it, its owners are to be told."""
        known = self._store.ownership.known_owners.values()
        generation = max((generation_of(one.term) for one in known), default=0)
        stored = [generation_of(one.term) for one in self._store.stored.values()]
        if generation > max([self._context.record.generation, *stored]):
            self._recorded = recorded_deltas(self._store, self._context.record)
            if self._recorded.count():
                self._untold = dict.fromkeys(range(len(self._store)))

    def due(self) -> bool:
        return bool(self._untold) and self._clock.monotonic() - self._told_s >= REPORT_INTERVAL_S

    async def tell(self) -> None:
        """Tell the owners of the shards that have no copy of this node left to be settled."""
        self._told_s = self._clock.monotonic()
        unsettled = to_mend(self._store.superseded)
        ready = [shard for shard in self._untold if shard not in unsettled]
        own = [shard for shard in ready if shard in self._store.owned]
        self.count(own, self._recorded, "its own disk")
        for shard in own:
            del self._untold[shard]
        groups, unknown = self._directory.by_owner(shard for shard in ready if shard not in self._store.owned)
        rows = self._recorded.rows()
        pieces = [rows[start : start + MAX_ROWS] for start in range(0, len(rows), MAX_ROWS)]
        for owner, shards in groups:
            try:
                for piece in pieces:
                    question = Offer(self._context.genesis, shards, piece)
                    answer = await self._rpc.ask(owner, "offer", question, OwnedHistories, QUESTION_TIMEOUT_S)
            except TransportError as error:
                self._log.debug("record_not_told", owner=owner.node_id.hex()[:8], reason=str(error))
                continue
            for history in answer.histories:
                if history.status == "owner":
                    self._untold.pop(history.shard, None)
                elif history.status == "not_owner":
                    self._store.note_owners([] if history.owner_info is None else [history.owner_info])
                    self._directory.denied(history.shard, owner)
        await self._directory.refresh(unknown)

    async def keep_aside(self, shard: int, copy: SupersededCopy, missing: Applied) -> None:
        """Keep a copy that has deltas which its shard will not have."""
        file, disk = KEPT_FILE.format(shard=shard), self._context.environment.disk
        parts = state_files.encode(self._context.run_genesis, [(shard, copy.term, copy.state)], clean=False)
        try:
            await self._context.environment.executor.run(disk.write, file, b"".join(parts))
        except OSError as error:
            self._log.error("late_copy_not_kept", shard=shard, reason=str(error))
            return
        self._log.warning("late_copy_kept_aside", shard=shard, file=file, deltas=missing.count())

    # -- an owner -----------------------------------------------------------------------------------------------

    def count(self, shards: list[int], recorded: Applied, source: str) -> None:
        """Report the recorded deltas that shards owned here lack and that were not reported before."""
        lost: list[Span] = []
        concerned = 0
        for shard in shards:
            missing = spans(write_off(self._store.owned[shard].state, recorded))
            lost += missing
            concerned += bool(missing)
        count = sum(high - low + 1 for _, _, low, high in lost)
        if count:
            self._context.counters.lost_in_restarts += count
            self._log.warning(
                "deltas_lost_in_restart", count=count, shards=concerned, deltas=named(lost), source=source
            )

    async def count_offered(self, shards: list[int], message: Offer, sender: Contact) -> None:
        """Count what a node that came late has recorded, in those of the shards that are owned here by then."""
        if message.recorded:
            executor, work = self._context.environment.executor, VALUES_PER_ROW * len(message.recorded)
            recorded = await off_loop(executor, work, Applied.of_rows, message.recorded)
            owned = [shard for shard in shards if shard in self._store.owned]
            self.count(owned, recorded.up_to(self._context.view.furthest_step()), sender.node_id.hex()[:8])
