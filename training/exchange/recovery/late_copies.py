"""What a node knows of the time before its swarm was started again without it, and what becomes of it.

The swarm has gone on with the best copies that it found. A node that comes later, or that has trained on meanwhile, may
have recorded deltas that those copies lack. It sends the owners what it has recorded, once, and they report what is
lost. What it can send again (`resending`) it sends before. An owner passes on to its backup and its learner what
it has reported: whoever owns the shard next does not report it again. A state of the node's disk that the swarm cannot
use any more is kept in a file, so that no value is thrown away by a program.
"""

from __future__ import annotations

import asyncio

from overlay.peers import Contact
from overlay.transport import TransportError
from training.exchange.context import ExchangeContext
from training.exchange.cooperative import VALUES_PER_ROW, off_loop
from training.exchange.directory import QUESTION_TIMEOUT_S, OwnerDirectory
from training.exchange.ownership_messages import MAX_ROWS, Identities, Offer, OwnedHistories
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
        #: The latest start of the swarm that this node has heard of; None before it is in its swarm.
        self._generation: int | None = None
        #: Shards whose owners have not been told.
        self._untold: dict[int, None] = {}
        self._told_s = 0.0
        #: Owned shards of whose losses a backup or a learner has not been told.
        self._to_pass_on: dict[int, None] = {}

    def take_from(self, former: LateCopies, factor: int) -> None:
        """Go on after another one, whose shards were divided into so many parts each."""
        self._recorded, self._generation = former._recorded, former._generation
        self._untold = {factor * shard + part: None for shard in former._untold for part in range(factor)}
        self._to_pass_on = {factor * shard + part: None for shard in former._to_pass_on for part in range(factor)}

    # -- the node that comes late -------------------------------------------------------------------------------

    def remember(self) -> None:
        """Called before this node settles: if the swarm was started again without it, its owners are to be told."""
        generation = self._generation = self._present_generation()
        stored = [generation_of(one.term) for one in self._store.stored.values()]
        if generation > max([self._context.record.generation, *stored]):
            self._recorded = recorded_deltas(self._store, self._context.record)
            if self._recorded.count():
                self._untold = dict.fromkeys(range(len(self._store)))

    def _present_generation(self) -> int:
        known = self._store.ownership.known_owners.values()
        return max((generation_of(one.term) for one in known), default=0)

    def _look_for_restart(self) -> None:
        """Whether the swarm was started again while this node trained on. What it has on its way will arrive."""
        if self._generation is not None and (generation := self._present_generation()) > self._generation:
            self._generation = generation
            self._recorded = self._context.record.acknowledged().without(self._context.kept.identities())
            self._untold = dict.fromkeys(range(len(self._store)) if self._recorded.count() else ())

    def due(self) -> bool:
        now_s = self._clock.monotonic()
        if now_s - self._told_s < REPORT_INTERVAL_S:
            return False
        self._look_for_restart()
        return bool(self._untold)

    async def tell(self) -> None:
        """Tell the owners of the shards that have no copy of this node left to be settled, nor a delta to be sent."""
        self._told_s = self._clock.monotonic()
        unsettled, in_doubt = to_mend(self._store.superseded), self._context.acknowledged.in_doubt
        ready = [shard for shard in self._untold if shard not in unsettled and not in_doubt(shard)]
        own = [shard for shard in ready if shard in self._store.owned]
        self.count(own, self._recorded, "its own disk")
        await self.pass_on(own)
        for shard in own:
            if shard not in self._to_pass_on:
                self._untold.pop(shard, None)
        groups, unknown = self._directory.by_owner(shard for shard in ready if shard not in self._store.owned)
        pieces = _pieces(self._recorded)
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
            if missing:
                concerned += 1
                self._to_pass_on[shard] = None
        count = sum(high - low + 1 for _, _, low, high in lost)
        if count:
            self._context.counters.lost_in_restarts += count
            self._log.warning(
                "deltas_lost_in_restart", count=count, shards=concerned, deltas=named(lost), source=source
            )

    async def count_offered(self, shards: list[int], message: Offer, sender: Contact) -> list[int]:
        """Count what a node that came late has recorded, in those of the shards that are owned here by then. Returns
        those that are to be offered again: a partner has not been told."""
        if not message.recorded:
            return []
        recorded = await self._decoded(message)
        owned = [shard for shard in shards if shard in self._store.owned]
        self.count(owned, recorded, sender.node_id.hex()[:8])
        await self.pass_on(owned)
        return [shard for shard in owned if shard in self._to_pass_on]

    async def pass_on_all(self) -> None:
        """A swarm was started again: learners may have been sent copies before its losses were written off."""
        lost = [shard for shard, owned in self._store.owned.items() if owned.state.written_off.row_count]
        self._to_pass_on |= dict.fromkeys(lost)
        await self.pass_on(lost)

    async def pass_on(self, shards: list[int]) -> None:
        """Tell backups and learners what was written off after their copies were taken."""
        told = [shard for shard in shards if shard in self._to_pass_on]
        #: Most often the same is lost in many shards.
        groups: dict[tuple[Contact, tuple[Span, ...]], tuple[Applied, list[int]]] = {}
        for shard in told:
            if (owned := self._store.owned.get(shard)) is not None:
                lost = owned.state.written_off.copy()
                for to in owned.targets():
                    groups.setdefault((to, tuple(spans(lost))), (lost, []))[1].append(shard)
        jobs = [self._pass_on_to(to, lost, concerned) for (to, _), (lost, concerned) in groups.items()]
        failed = {shard: None for concerned in await asyncio.gather(*jobs) for shard in concerned} if jobs else {}
        for shard in told:
            if shard not in failed:
                self._to_pass_on.pop(shard, None)

    async def _pass_on_to(self, to: Contact, lost: Applied, shards: list[int]) -> list[int]:
        """Returns the shards of which the receiver may not have been told."""
        try:
            for piece in _pieces(lost):
                message = Offer(self._context.genesis, shards, piece, is_passed_on=True)
                await self._rpc.ask(to, "offer", message, OwnedHistories, QUESTION_TIMEOUT_S)
        except TransportError as error:
            self._log.debug("losses_not_passed_on", target=to.node_id.hex()[:8], reason=str(error))
            return shards
        return []

    # -- its backup ---------------------------------------------------------------------------------------------

    async def note(self, message: Offer, owner: Contact) -> None:
        """Remember what the owner of shards that are backed up here has reported as lost. It may have handed a shard
        over since: then it is the backup of this node."""
        lost = await self._decoded(message)
        for shard in message.shards:
            owned, backed = self._store.owned.get(shard), self._store.backed.get(shard)
            if owned is not None and owner.node_id in owned.target_ids():
                owned.state.written_off.merge(lost)
            elif backed is not None and backed.owner.node_id == owner.node_id:
                backed.note_written_off(lost)

    async def _decoded(self, message: Offer) -> Applied:
        executor, work = self._context.environment.executor, VALUES_PER_ROW * len(message.recorded)
        recorded = await off_loop(executor, work, Applied.of_rows, message.recorded)
        return recorded.up_to(self._context.view.furthest_step())


def _pieces(recorded: Applied) -> list[Identities]:
    """Rows for one message each."""
    rows = recorded.rows()
    return [rows[start : start + MAX_ROWS] for start in range(0, len(rows), MAX_ROWS)]
