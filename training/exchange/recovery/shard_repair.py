"""Gives a broken shard of a living owner its last good copy: the owner goes on with it under a new term.

In this order: the backup's state, which has every acknowledged delta; the value that this node pulled, or that others
did, if it is known which deltas it has; any value that was pulled, as after the death of owner and backup; and the
node's own checkpoints, the newest first. What the copy lacks is added from the repair log. Meanwhile the shard takes no
delta and sends no value, so that nothing is acknowledged that the copy lacks.
"""

from __future__ import annotations

import asyncio

from overlay.peers import Contact
from overlay.transport import TransportError
from training.encoding.frames import BadFrame, FrameReader
from training.exchange.context import ExchangeContext
from training.exchange.cooperative import off_loop
from training.exchange.directory import QUESTION_TIMEOUT_S
from training.exchange.owner.final_values import value_digest
from training.exchange.ownership_messages import CopyStatus, Fetch, StateTransfer, Survey, SurveyAnswer
from training.exchange.store import state_stream
from training.exchange.store.good_copies import PulledValue, add_missing, agreed, has_all_of, state_at
from training.exchange.store.records import Owned
from training.exchange.terms import Term
from training.shards.delta_range import MAX_STATE_LENGTH, has_length
from training.shards.state import ShardState

#: A repair that found no good copy is tried again after this long.
RETRY_S = 1.0
#: Nodes that are asked for the value that they pulled, and values that are compared.
MAX_ASKED, MAX_COMPARED = 16, 3


class ShardRepair:
    """The repairs of one node."""

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        self._swarm = context.swarm
        self._store = context.store
        self._replica = context.replica
        self._run = context.run
        self._view = context.view
        self._rpc = context.rpc
        self._executor = context.environment.executor
        self._clock = context.environment.clock
        self._log = context.environment.log
        #: When a shard's repair failed, in monotonic seconds.
        self._failed_s: dict[int, float] = {}

    def due(self) -> list[int]:
        """The broken shards that may be repaired now. One that moves to its backup may be good there in a moment."""
        now = self._clock.monotonic()
        broken = [shard for shard, owned in self._store.owned.items() if owned.is_broken]
        self._failed_s = {shard: self._failed_s[shard] for shard in broken if shard in self._failed_s}
        return [
            shard
            for shard in broken
            if not self._store.owned[shard].moving and now - self._failed_s.get(shard, -RETRY_S) >= RETRY_S
        ]

    async def repair(self, shards: list[int]) -> None:
        """Give each of these shards a good copy."""
        for shard in shards:
            owned = self._store.owned.get(shard)
            if owned is None or not owned.is_broken:
                continue
            if not await self._repair(shard, owned) and self._store.owned.get(shard) is owned:
                if shard not in self._failed_s:
                    self._log.error("shard_not_repaired", shard=shard)
                self._failed_s[shard] = self._clock.monotonic()

    async def _repair(self, shard: int, owned: Owned) -> bool:
        """False if no good copy was found."""
        backup = owned.backup
        others: PulledValue | None = None
        source, state = "backup", None if backup is None else await self._of_backup(shard, owned, backup)
        if state is None:
            source, state = "replica", self._at(owned, self._own_value(shard))
        if state is None:
            source, others = "replicas", await self._of_others(shard, owned)
            state = self._at(owned, others)
        is_listed = state is not None
        if state is None:
            source, state = "old replica", self._as_new_era(shard, self._own_value(shard) or others)
        if state is None:
            source, (state, is_listed) = "checkpoint", await self._of_checkpoint(shard, owned)
        if state is None:
            return False
        entries = self._store.log.entries(shard)
        work = state.value.size * max(1, len(entries))
        added, lost = await off_loop(
            self._executor, work, add_missing, state, owned.state, entries, self._store.rule, is_listed=is_listed
        )
        if not await off_loop(self._executor, state.value.size, state.is_in_range):
            return False
        if self._store.owned.get(shard) is not owned or owned.moving:
            return True  # another node owns it, or is about to
        # Where the backup's copy is this one it goes on as backup; a copy that is less sends for a new one.
        keeps = source == "backup" and owned.backup == backup and not added and not lost.count()
        term = self._store.next_term(shard)
        now, me = self._clock.monotonic(), self._context.me()
        self._store.own(shard, state, term, me, now, by_handover=False, backup=owned.backup if keeps else None)
        counters, count = self._context.counters, lost.count()
        counters.repaired_shards += 1
        counters.lost_in_repairs += count
        self._failed_s.pop(shard, None)
        self._log.warning(
            "shard_repaired",
            shard=shard,
            source=source,
            term=term.number,
            version=state.version,
            added=added,
            lost=count,
        )
        self._context.rebalance.wake()
        return True

    async def _of_backup(self, shard: int, owned: Owned, backup: Contact) -> ShardState | None:
        """The state of the backup; None if it does not answer, or its copy is broken too: then it may have dropped it
        already, and offers what it has pulled."""
        try:
            state = await self._fetch(shard, backup)
        except (TransportError, BadFrame) as error:
            self._log.warning("copy_not_taken", shard=shard, holder=backup.node_id.hex()[:8], reason=str(error))
            return None
        return state if state is not None and has_all_of(state, owned.state) else None

    def _at(self, owned: Owned, pulled: PulledValue | None) -> ShardState | None:
        return None if pulled is None else state_at(owned, pulled)

    def _own_value(self, shard: int) -> PulledValue | None:
        pulled, value = self._replica.pulled_version(shard), self._replica.slice_of(shard)
        if pulled is None or not pulled[1] or not has_length(value, MAX_STATE_LENGTH):
            return None  # one that is being written has version 0
        return PulledValue(*pulled, value.copy(), b"")

    def _as_new_era(self, shard: int, pulled: PulledValue | None) -> ShardState | None:
        """A value of which nobody knows which deltas it has: those with a base before now are refused."""
        if pulled is None:
            return None
        step = max(1, self._run.step)
        state = self._store.fresh_state(
            shard, pulled.value, version=pulled.version, era_step=step, era_term=pulled.term
        )
        state.unlisted = pulled.version
        return state

    async def _of_checkpoint(self, shard: int, owned: Owned) -> tuple[ShardState | None, bool]:
        """The copy of this node's newest checkpoint that has a good one, and whether all its deltas are known."""
        checkpoints = self._context.checkpoints
        found = None if checkpoints is None else await checkpoints.newest_good(shard)
        if found is None:
            return None, False
        state = found.state
        is_listed = state is not None and not state.unlisted
        if state is None:
            state = self._as_new_era(shard, PulledValue(found.term, found.version, found.value, b""))
        if state is not None:
            state.norms = owned.state.norms.copy()
        return state, is_listed

    async def _of_others(self, shard: int, owned: Owned) -> PulledValue | None:
        """The newest value that others pulled; of the best few, the one that most agree on."""
        peers = [peer.contact for peer in self._swarm.members() if peer.node_id in self._view.trust][:MAX_ASKED]
        asked = await asyncio.gather(*(self._status(contact, shard) for contact in peers))
        statuses = [(copy, contact) for copy, contact in zip(asked, peers, strict=True) if copy is not None]
        statuses.sort(key=lambda one: (owned.first_term <= one[0].term <= owned.term, one[0].version), reverse=True)
        found: list[PulledValue] = []
        for _, contact in statuses[:MAX_COMPARED]:
            try:
                state = await self._fetch(shard, contact)
            except (TransportError, BadFrame):
                continue
            if state is not None:
                digest = await off_loop(self._executor, state.value.size, value_digest, state.value)
                # A replica's era is of the term that it was pulled under.
                found.append(PulledValue(Term(*state.era_term), state.version, state.value, digest))
        return agreed(found)

    async def _status(self, contact: Contact, shard: int) -> CopyStatus | None:
        """A node's copy, if it is a value that it pulled."""
        try:
            survey = Survey(self._context.genesis, [shard])
            answer = await self._rpc.ask(contact, "survey", survey, SurveyAnswer, QUESTION_TIMEOUT_S)
        except TransportError:
            return None
        plausible = self._store.ownership.is_plausible
        return next((one for one in answer.statuses if _is_pulled(one, shard) and plausible(one.term)), None)

    async def _fetch(self, shard: int, holder: Contact) -> ShardState | None:
        async with self._rpc.request("fetch", holder, Fetch(self._context.genesis, [shard])) as answer:
            heads = (await self._rpc.decoded(holder, answer.head, StateTransfer)).states
            if len(heads) != 1 or heads[0].shard != shard:
                return None
            most, reader = self._view.plausible_steps(), FrameReader(answer.body)
            return await state_stream.read_state(reader, heads[0], self._store, most, self._executor)


def _is_pulled(copy: CopyStatus, shard: int) -> bool:
    return copy.shard == shard and copy.role == "replica" and not copy.is_stored and copy.version > 0
