"""Reconciles the two sides of a split: owners exchange claims, and the one that lost a shard offers its deltas.

Of two owners the one with the higher term wins. The loser keeps its copy and its repair log. It offers its deltas by
identity until the winner has all of them. They are replicated like any push, with the weight that they would have had
among all workers, and without momentum. Deltas that are no longer in the log are reported as lost, with their
identities.

One exception: the winner started from a replica while the loser has the whole history. It is unknown which deltas the
replica had. So the loser takes the shard back, and the deltas of the other side are added to its copy. Where it cannot,
its copy waits for a later owner that can tell what it has. A copy from before a restart of the swarm, in memory or on
disk, takes its shard back only if it has more deltas than the owner.
"""

from __future__ import annotations

import contextlib

from overlay.peers import Contact, PeerChange
from overlay.transport import TransportError
from training.encoding.frames import BadFrame, FrameReader, list_if_small
from training.exchange.context import ExchangeContext
from training.exchange.directory import QUESTION_TIMEOUT_S, OwnerDirectory
from training.exchange.messages import MAX_DELTAS, LocateOwners, LocateOwnersAnswer
from training.exchange.owner.delta_item import logged_item, read_item
from training.exchange.owner.deltas import DeltaHandler
from training.exchange.ownership_messages import (
    MAX_SOUGHT,
    FindDeltas,
    FoundDeltas,
    Identities,
    OfferedDeltas,
    OfferedDeltasAnswer,
    OwnedHistory,
    ShardList,
)
from training.exchange.recovery.repair_handler import MAX_BATCH_BYTES, RepairHandler, as_message, logged_bodies
from training.exchange.store.repair_log import (
    Difference,
    LogEntry,
    Span,
    SupersededCopy,
    compare,
    identities_of,
    only_here,
    spans,
)
from training.exchange.terms import OwnerInfo, Term, generation_of
from training.shards.applied import DeltaId

#: Owners send their claims to one more node this often, and at once to nodes that return.
CLAIMS_INTERVAL_S = 2.0
#: Returned peers that are sent the claims in one round.
MAX_CLAIMS_PER_TICK = 8
#: How often the deltas of superseded copies are offered.
OFFER_INTERVAL_S = 0.5
#: How often other nodes are searched for deltas that the own log no longer has.
MAX_SEARCHES = 4
#: Nodes searched each time; in a larger swarm a node that has them may be missed.
MAX_NODES_SEARCHED = 64
#: An occasion is over when no shard was agreed on for so long: after a restart of all nodes there are dozens of shards.
OCCASION_S = 3.0
#: Spans of lost deltas listed in one event; the others are counted.
MAX_LISTED = 32


class SplitReconciler:
    """The claims of one node, and its offers of lost shards. `repairs` answers those of other nodes."""

    def __init__(self, context: ExchangeContext, directory: OwnerDirectory, deltas: DeltaHandler) -> None:
        self._context = context
        self._swarm = context.swarm
        self._store = context.store
        self._run = context.run
        self._view = context.view
        self._rpc = context.rpc
        self._rebalance = context.rebalance
        self._counters = context.counters
        self._clock = context.environment.clock
        self._log = context.environment.log
        self._random = context.environment.entropy.random
        self._directory = directory
        self.repairs = RepairHandler(context, deltas)
        self._claimed_at = self._clock.monotonic()
        self._offered_at = 0.0
        #: Peers that were declared dead and are back: they are sent the claims.
        self.returned: dict[bytes, None] = {}
        self._mended, self._mended_lost, self._mended_at = 0, 0, 0.0

    def on_change(self, change: PeerChange) -> None:
        """A node that was declared dead has returned: it may have been on the other side of a split."""
        if change.kind == "returned":
            self.returned[change.node_id] = None

    def due(self) -> bool:
        """Whether to send anything now. It also advances the clock of the log, and reports an occasion that is over."""
        now = self._clock.monotonic()
        self._report_mended(now)
        self._store.log.tick(now, self._view.worker_count(), self._store.superseded)
        if now - self._offered_at >= OFFER_INTERVAL_S and self._unsettled():
            return True
        return bool(self._store.owned) and (bool(self.returned) or now - self._claimed_at >= CLAIMS_INTERVAL_S)

    async def reconcile(self) -> None:
        """Send the claims of this node, and offer the deltas of its superseded copies."""
        await self._send_claims()
        if not (unsettled := self._unsettled()):
            return
        self._offered_at = self._clock.monotonic()
        offers: dict[bytes, tuple[Contact, list[int]]] = {}
        for shard in unsettled:
            if shard not in self._store.superseded:
                continue  # settled while another one was
            known = self._store.ownership.known_owners.get(shard)
            if shard in self._store.owned:
                await self._settle_own(shard)
            elif known is not None and not self._view.is_gone(known.owner.node_id):
                offers.setdefault(known.owner.node_id, (known.owner, []))[1].append(shard)
            else:
                self._rebalance.take_over(shard)
        for owner, shards in offers.values():
            try:
                await self._offer(owner, shards)
            except TransportError as error:
                self._log.debug("offer_failed", owner=owner.node_id.hex()[:8], reason=str(error))

    def _unsettled(self) -> list[int]:
        """The shards whose superseded copies are to be offered. Where an owner cannot tell what it has, the copy waits
        for another one, as long as the log reaches."""
        now, known, found = self._clock.monotonic(), self._store.ownership.known_owners, []
        for shard, copy in list(self._store.superseded.items()):
            if copy.unclear_at is None or (shard in known and known[shard].term > copy.unclear_at):
                found.append(shard)
            # Promise 5: as far as the log reaches.
            elif now - copy.unclear_since_s >= self._store.log.seconds:
                del self._store.superseded[shard]
        return found

    # -- claims -------------------------------------------------------------------------------------------------

    async def _send_claims(self) -> None:
        """Send what this node owns: this is how two owners of one shard learn of each other."""
        self._claimed_at = self._clock.monotonic()
        me = self._context.me()
        # Promise 5.
        claims = [OwnerInfo.of(shard, owned.term, me) for shard, owned in self._store.owned.items()]
        if not claims:
            return
        known = {peer.node_id: peer.contact for peer in self._swarm.members() if peer.eligible}
        receivers = [known[node] for node in list(self.returned)[:MAX_CLAIMS_PER_TICK] if node in known]
        for node in list(self.returned)[:MAX_CLAIMS_PER_TICK]:
            del self.returned[node]
        if not receivers and known:
            receivers = [known[self._random.choice(sorted(known))]]
        for contact in receivers:
            shards = [claim.shard for claim in claims]
            try:
                question = LocateOwners(shards, claims)
                answer = await self._rpc.ask(contact, "where_is", question, LocateOwnersAnswer, QUESTION_TIMEOUT_S)
            except TransportError:
                continue
            self._store.note_owners(answer.known)

    # -- the side with the lower term ---------------------------------------------------------------------------

    async def _offer(self, owner: Contact, shards: list[int]) -> None:
        question = ShardList(shards)
        async with self._rpc.question(owner, "offer", question, QUESTION_TIMEOUT_S) as answer:
            told, reader = self._rpc.decoded(owner, answer.head, ShardList).shards, FrameReader(answer.body)
            histories = [await self._rpc.record(owner, reader, shard, OwnedHistory) for shard in told]
        wanted: list[tuple[int, LogEntry]] = []
        unknown: list[int] = []
        for history in histories:
            copy = self._store.superseded.get(history.shard)
            if copy is None or history.status == "retry":
                continue
            if history.status == "not_owner":
                self._store.note_owners([] if history.owner_info is None else [history.owner_info])
                self._directory.denied(history.shard, owner)
                unknown.append(history.shard)
            elif self._takes_back(copy, history):
                self._take_back(history, copy)
            else:
                wanted += await self._settle(history.shard, copy, history)
        await self._directory.refresh(unknown)
        while wanted:
            batch: list[tuple[int, LogEntry]] = []
            remaining_bytes = MAX_BATCH_BYTES
            while wanted and len(batch) < MAX_DELTAS and (not batch or len(wanted[-1][1].payload) <= remaining_bytes):
                remaining_bytes -= len(wanted[-1][1].payload)
                batch.append(wanted.pop())
            await self._send(owner, batch)

    def _takes_back(self, copy: SupersededCopy, history: OwnedHistory) -> bool:
        # Promise 6: of two states from before a restart the higher one counts.
        is_of_before = copy.is_stored or generation_of(history.term) > generation_of(copy.term)
        if is_of_before and copy.state.known_count <= history.known_count:
            return False
        # Promise 5: the side with the whole history goes on.
        newer_era = history.era_step > copy.state.era_step
        # A term with the same number is the other side's: its state cannot descend from this copy.
        if not newer_era or self._run.is_leaving or copy.term.number < history.era_term.number:
            return False
        # A new era that started from a state on disk has its identities, and may have all of this copy's.
        return bool(copy.known().without(history.known_deltas()).rows())

    def _take_back(self, history: OwnedHistory, copy: SupersededCopy) -> None:
        shard = history.shard
        if shard in self._store.owned or self._store.ownership.fence(shard) > history.term:
            return
        self._own_again(shard, copy, history.term)
        self._claimed_at = 0.0  # the other node is informed at once
        self.returned[history.term.node] = None

    def _own_again(self, shard: int, copy: SupersededCopy, above: Term) -> None:
        term = self._store.next_term(shard, above)
        now = self._clock.monotonic()
        self._store.own(shard, copy.state, term, self._context.me(), now, by_handover=False)
        self._log.warning("shard_taken_back", shard=shard, term=term.number)
        self._rebalance.wake()

    async def _settle(self, shard: int, copy: SupersededCopy, history: OwnedHistory) -> list[tuple[int, LogEntry]]:
        """The deltas of this node that the winner lacks. If there are none, report what is lost and drop the copy."""
        known = history.known_deltas()
        # An old copy against a newer replica: it is unknown which deltas that one has, so none is added.
        unclear = bool(history.unlisted) if copy.is_stored else history.era_step > copy.state.era_step
        difference = compare(copy, known, () if unclear else self._store.log.entries(shard))
        if difference.wanted:
            return [(shard, entry) for entry in difference.wanted]
        is_sought = difference.lost and not unclear and not copy.is_stored and copy.sought < MAX_SEARCHES
        if is_sought and await self._seek(shard, difference):
            copy.sought += 1
            return []  # offered in the next round
        if self._store.superseded.get(shard) is copy:
            missing = only_here(copy, known, () if unclear else self._store.log.entries(shard))
            if copy.is_stored:
                self._report_stored(shard, max(0, missing.count() - history.unlisted))
            else:
                self._report_lost(shard, copy, spans(missing))
            if unclear and not copy.is_stored:
                copy.wait_for_another_owner(history.term, self._clock.monotonic())
            else:
                del self._store.superseded[shard]
        return []

    async def _seek(self, shard: int, difference: Difference) -> bool:
        """Search former owners for deltas of this copy that this node's log lacks. True when some were found."""
        rows = [(node, incarnation, [(low, high)]) for node, incarnation, low, high in difference.lost]
        pages = [rows[first : first + MAX_SOUGHT] for first in range(0, len(rows), MAX_SOUGHT)]
        before = len(self._store.log.entries(shard))
        # The candidates of one side of the split need not be those of the whole swarm.
        asked = {contact.node_id: contact for contact in await self._directory.candidates(shard)}
        asked |= {peer.node_id: peer.contact for peer in self._swarm.members()}
        asked.pop(self._swarm.node_id, None)
        for contact in list(asked.values())[:MAX_NODES_SEARCHED]:
            with contextlib.suppress(TransportError, BadFrame):
                for page in pages:
                    await self._seek_at(contact, shard, page)
        return len(self._store.log.entries(shard)) > before

    async def _seek_at(self, contact: Contact, shard: int, rows: Identities) -> None:
        """Put the deltas that one node has into the log. Raises `TransportError` and `BadFrame`."""
        message = FindDeltas(shard, rows)
        async with self._rpc.request("seek", contact, message) as answer:
            reader = FrameReader(answer.body)
            for one in self._rpc.decoded(contact, answer.head, FoundDeltas).deltas:
                item = await read_item(reader, shard, self._store.size(shard))
                identity = DeltaId(one.node, one.incarnation, one.step)
                self._store.log.add(
                    shard, identity, one.weight, item.encoded, item.codec, momentum=True, workers=one.workers
                )

    async def _settle_own(self, shard: int) -> None:
        """Settle a superseded copy of a shard that this node owns now."""
        copy, owned = self._store.superseded[shard], self._store.owned[shard]
        if copy.state is owned.state and not copy.earlier.without(identities_of(owned.state)).count():
            del self._store.superseded[shard]
            return
        history = self.repairs.history(shard)
        if history.status == "owner" and self._takes_back(copy, history):
            # The owned state started from a replica and the former copy has the whole history: exchange them.
            del self._store.superseded[shard]
            self._store.step_down(shard)
            self._own_again(shard, copy, owned.term)
            return
        for _, entry in await self._settle(shard, copy, history) if history.status == "owner" else ():
            item = logged_item(shard, entry.payload, entry.codec, self._store.size(shard), repair=True)
            if await self.repairs.add(as_message(shard, entry), item, self._swarm.node_id) == "refused":
                self._store.log.forget(shard, entry.identity)

    def _report_lost(self, shard: int, copy: SupersededCopy, lost: list[Span]) -> None:
        count = sum(high - low + 1 for _, _, low, high in lost)
        # Promise 5: what the log does not reach is counted.
        self._counters.lost_in_splits += count - copy.reported
        if count > copy.reported:
            named = [f"{node.hex()[:8]}/{inc}:{low}-{high}" for node, inc, low, high in lost[:MAX_LISTED]]
            reach = round(self._store.log.reach_s, 1)
            self._log.error("deltas_lost_in_split", shard=shard, count=count, deltas=named, reach_s=reach)
        copy.reported = count
        self._mended += 1
        self._mended_lost += count
        self._mended_at = self._clock.monotonic()

    def _report_stored(self, shard: int, count: int) -> None:
        """How many deltas a copy from this node's disk had that its shard goes on without."""
        if count:
            # Promise 6.
            self._counters.lost_in_restarts += count
            self._log.warning("deltas_lost_in_restart", shard=shard, count=count)

    def _report_mended(self, now: float) -> None:
        if self._mended and now - self._mended_at >= OCCASION_S:
            self._log.info("split_mended", shards=self._mended, lost=self._mended_lost)
            self._mended = self._mended_lost = 0

    async def _send(self, owner: Contact, batch: list[tuple[int, LogEntry]]) -> None:
        message = OfferedDeltas([as_message(shard, entry) for shard, entry in batch])
        size = sum(len(entry.payload) for _, entry in batch)
        self._counters.bytes_sent += size
        body = list_if_small(logged_bodies(batch, is_batch=self._store.holds_values), size)
        async with self._rpc.request("mend", owner, message, body) as answer:
            for place in self._rpc.decoded(owner, answer.head, OfferedDeltasAnswer).refused:
                if place < len(batch):
                    shard, entry = batch[place]
                    self._store.log.forget(shard, entry.identity)
