"""Reconciles the two sides of a split: owners exchange claims, and the one that lost a shard offers its deltas.

Of two owners the one with the higher term wins. The loser keeps its copy and its repair log. It asks the winner which
deltas it has, and offers the others by identity until the winner has all of them. They are replicated like any push,
with the weight that they would have had among all workers, and without momentum. Deltas that are no longer in the log
are looked for in the logs of others; those that no node has are reported as lost, with their identities.

One exception: the winner started from a replica while the loser has the whole history. It is unknown which deltas the
replica had. So the loser takes the shard back, and the deltas of the other side are added to its copy. Where it cannot,
its copy waits for a later owner that can tell what it has. A copy from before a restart of the swarm, in memory or on
disk, takes its shard back only if it has more deltas than the owner. `training.exchange.store.records` decides.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.peers import Contact, PeerChange
from p2pnode.overlay.transport import Buffer, Response, TransportError
from p2pnode.training.cooperative import VALUES_PER_ROW, off_loop
from p2pnode.training.encoding.frames import BadFrame, FrameReader, list_if_small
from p2pnode.training.exchange.delta import IncomingDelta, logged_frames, logged_item, read_item
from p2pnode.training.exchange.directory import OwnerDirectory
from p2pnode.training.exchange.messages import (
    MAX_DELTAS,
    LocateOwners,
    LocateOwnersAnswer,
    Push,
    PushStatus,
    encode,
    record_frames,
)
from p2pnode.training.exchange.owner.deltas import DeltaHandler
from p2pnode.training.exchange.owner.replication import lacks_backup
from p2pnode.training.exchange.ownership_messages import (
    MAX_SOUGHT,
    FindDeltas,
    FoundDeltas,
    Identities,
    LoggedDelta,
    OfferedDeltas,
    OfferedDeltasAnswer,
    OwnedHistory,
    ShardList,
)
from p2pnode.training.exchange.rpc import ExchangeRpc
from p2pnode.training.exchange.run_state import RebalanceRequests, RunState, SwarmView
from p2pnode.training.exchange.store.records import LogEntry, SupersededCopy, compare, identities_of
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import MAX_BELIEVED, OwnerInfo, Term
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.applied import Applied, DeltaId
from p2pnode.training.swarm import Swarm

#: Owners send their claims to one more node this often, and at once to nodes that return.
CLAIMS_INTERVAL_S = 2.0
#: How often the deltas of superseded copies are offered.
OFFER_INTERVAL_S = 0.5
#: How often other nodes are searched for deltas that the own log no longer has.
MAX_SEARCHES = 4
#: Nodes searched each time; in a larger swarm a node that has them may be missed.
MAX_NODES_SEARCHED = 64
#: Spans of lost deltas listed in one event; the others are counted.
MAX_LISTED = 32
#: Deltas of one request, in bytes.
MAX_BATCH_BYTES = 16 * 1024 * 1024

#: A delta of the log, and its shard.
Logged = tuple[int, LogEntry]


@dataclass(eq=False)
class SplitReconciler:
    """The claims of one node, its offers of lost shards, and its answers to those of other nodes."""

    swarm: Swarm
    store: ShardStore
    view: SwarmView
    run: RunState
    rpc: ExchangeRpc
    rebalance: RebalanceRequests
    directory: OwnerDirectory
    deltas: DeltaHandler
    settings: ExchangeSettings
    environment: Environment

    def __post_init__(self) -> None:
        self._clock = self.environment.clock
        self._log = self.environment.log
        self._claimed_at = self._clock.monotonic()
        self._offered_at = 0.0
        #: Peers that were declared dead and are back: they are sent the claims.
        self.returned: dict[bytes, None] = {}
        #: The lost deltas of the shards that this round has settled.
        self._mended: list[int] = []

    def register(self) -> None:
        """Register the request handlers."""
        self.rpc.register("offer_repair", ShardList, self._on_offer_repair, waits=True)
        self.rpc.register("request_repair", FindDeltas, self._on_request_repair)
        self.rpc.register("repair", OfferedDeltas, self._on_offered_deltas, waits=True)

    def on_change(self, change: PeerChange) -> None:
        """A node that was declared dead has returned: it may have been on the other side of a split."""
        if change.kind == "returned":
            self.returned[change.node_id] = None

    def due(self) -> bool:
        """Whether to send anything now. It also advances the clock of the log."""
        now = self._clock.monotonic()
        self.store.log.tick(now, self.view.worker_count(), self.store.superseded)
        if now - self._offered_at >= OFFER_INTERVAL_S and self._unsettled():
            return True
        return bool(self.store.owned) and (bool(self.returned) or now - self._claimed_at >= CLAIMS_INTERVAL_S)

    async def reconcile(self) -> None:
        """Send the claims of this node, and offer the deltas of its superseded copies."""
        await self._send_claims()
        if not (unsettled := self._unsettled()):
            return
        self._offered_at = self._clock.monotonic()
        offers: dict[bytes, tuple[Contact, list[int]]] = {}
        for shard in unsettled:
            known = self.store.ownership.known_owners.get(shard)
            if shard in self.store.owned:
                offers.setdefault(self.store.node_id, (self.rpc.me, []))[1].append(shard)
            elif known is not None and not self.view.is_gone(known.owner.node_id):
                offers.setdefault(known.owner.node_id, (known.owner, []))[1].append(shard)
            else:
                self.rebalance.take_over(shard)
        for owner, shards in offers.values():
            try:
                await self._offer(owner, shards)
            except TransportError as error:
                self._log.debug("offer_failed", owner=owner.node_id.hex()[:8], reason=str(error))
        if self._mended:
            self._log.info("split_mended", shards=len(self._mended), lost=sum(self._mended))
            self._mended = []

    def _unsettled(self) -> list[int]:
        """The shards whose superseded copies are to be offered. Where an owner cannot tell what it has, the copy waits
        for another one, as long as the log reaches."""
        now, known, found = self._clock.monotonic(), self.store.ownership.known_owners, []
        for shard, copy in list(self.store.superseded.items()):
            if copy.unclear_at is None or (shard in known and known[shard].term > copy.unclear_at):
                found.append(shard)
            # Promise 5 (docs/faults.md): as far as the log reaches.
            elif now - copy.unclear_since_s >= self.store.log.seconds:
                del self.store.superseded[shard]
        return found

    async def _send_claims(self) -> None:
        """Tell one node what this one owns: this is how two owners of one shard learn of each other."""
        self._claimed_at, me = self._clock.monotonic(), self.rpc.me
        # Promise 5: two owners of a shard learn of each other.
        claims = [OwnerInfo.of(shard, owned.term, me) for shard, owned in self.store.owned.items()]
        known = {peer.node_id: peer.contact for peer in self.swarm.members() if peer.eligible}
        self.returned = {node: None for node in self.returned if node in known}
        if not claims or not known:
            return
        node = next(iter(self.returned), b"") or self.environment.entropy.random.choice(sorted(known))
        self.returned.pop(node, None)
        question = LocateOwners([claim.shard for claim in claims], claims)
        with contextlib.suppress(TransportError):
            answer = await self.rpc.ask(known[node], "where_is", question, LocateOwnersAnswer)
            self.store.note_owners(answer.known)

    # -- the side with the lower term ---------------------------------------------------------------------------

    async def _offer(self, owner: Contact, shards: list[int]) -> None:
        """Settle superseded copies with the owner of their shards, which may be this node. Raises `TransportError`."""
        wanted: list[Logged] = []
        unknown: list[int] = []
        for history in await self._histories(owner, shards):
            copy = self.store.superseded.get(history.shard)
            if copy is None or history.status == "retry":
                continue
            if history.status == "not_owner":
                self.store.note_owners([] if history.owner_info is None else [history.owner_info])
                self.directory.denied(history.shard, owner)
                unknown.append(history.shard)
            elif copy.takes_back(history) and not self.run.is_leaving:
                self._take_back(history.shard, copy, history.term)
            else:
                wanted += [(history.shard, entry) for entry in await self._settle(copy, history)]
        await self.directory.refresh(unknown)
        while wanted:
            batch = first_batch(wanted)
            for place in (await self.send(owner, batch)).refused:
                if place < len(batch):
                    shard, entry = batch[place]
                    self.store.log.forget(shard, entry.identity)
            wanted = wanted[len(batch) :]

    async def _histories(self, owner: Contact, shards: list[int]) -> list[OwnedHistory]:
        if owner.node_id == self.store.node_id:
            return [self.history(shard) for shard in shards]
        async with self.rpc.question(owner, "offer_repair", ShardList(shards)) as answer:
            told, reader = self.rpc.decoded(owner, answer.head, ShardList).shards, FrameReader(answer.body)
            return [await self.rpc.record(owner, reader, shard, OwnedHistory) for shard in told]

    def _take_back(self, shard: int, copy: SupersededCopy, above: Term) -> None:
        """Own a shard again, and have its owner, which may be this node with another state, offer what it has."""
        if self.store.ownership.fence(shard) > above:
            return
        if shard in self.store.owned:
            del self.store.superseded[shard]
            self.store.step_down(shard)
        term, me = self.store.next_term(shard, above), self.rpc.me
        self.store.own(shard, copy.state, term, me, self._clock.monotonic(), by_handover=False)
        self._log.warning("shard_taken_back", shard=shard, term=term.number)
        self.rebalance.wake()
        self._claimed_at = 0.0  # the other node is informed at once
        self.returned[above.node] = None

    async def _settle(self, copy: SupersededCopy, history: OwnedHistory) -> list[LogEntry]:
        """The deltas of this node that the winner lacks. If there are none, report what is lost and drop the copy."""
        shard, unclear = history.shard, copy.is_unclear_to(history)
        wanted, lost = compare(copy, history.known_deltas(), () if unclear else self.store.log.entries(shard))
        if wanted:
            return wanted
        is_sought = not unclear and not copy.is_stored and copy.sought < MAX_SEARCHES
        if is_sought and (rows := _by_span(lost)) and await self._seek(shard, rows):
            copy.sought += 1
            return []  # offered in the next round
        if self.store.superseded.get(shard) is not copy:
            return []
        if not copy.is_stored:
            self._report_lost(shard, copy, lost)
        # Promise 6: what the shard goes on without is counted.
        elif count := max(0, lost.count() - history.unlisted):
            self.run.counters.lost_in_restarts += count
            self._log.warning("deltas_lost_in_restart", shard=shard, count=count)
        if unclear and not copy.is_stored and lost.count():
            copy.wait_for_another_owner(history.term, self._clock.monotonic())
        else:
            del self.store.superseded[shard]
        return []

    async def _seek(self, shard: int, rows: Identities) -> bool:
        """Search former owners for deltas of this copy that this node's log lacks. True when some were found."""
        before = len(self.store.log.entries(shard))
        # The candidates of one side of the split need not be those of the whole swarm.
        asked = {contact.node_id: contact for contact in (await self.directory.candidates([shard]))[0]}
        asked |= {peer.node_id: peer.contact for peer in self.swarm.members()}
        asked.pop(self.store.node_id, None)
        for contact in list(asked.values())[:MAX_NODES_SEARCHED]:
            with contextlib.suppress(TransportError, BadFrame):
                for first in range(0, len(rows), MAX_SOUGHT):
                    await self._seek_at(contact, shard, rows[first : first + MAX_SOUGHT])
        return len(self.store.log.entries(shard)) > before

    async def _seek_at(self, contact: Contact, shard: int, rows: Identities) -> None:
        """Put the deltas that one node has into the log. Raises `TransportError` and `BadFrame`."""
        async with self.rpc.request("request_repair", contact, FindDeltas(shard, rows)) as answer:
            reader = FrameReader(answer.body)
            for one in self.rpc.decoded(contact, answer.head, FoundDeltas).deltas:
                item = await read_item(reader, shard, self.store.size(shard))
                identity = DeltaId(one.node, one.incarnation, one.step)
                self.store.log.add(shard, identity, one.weight, item.encoded, item.codec, workers=one.workers)

    async def send(self, owner: Contact, batch: list[Logged]) -> OfferedDeltasAnswer:
        """Have the owner of these shards, which may be this node, add deltas. Raises `TransportError`."""
        deltas = [_as_message(shard, entry) for shard, entry in batch]
        if owner.node_id == self.store.node_id:
            items = (
                logged_item(shard, one.payload, one.codec, self.store.size(shard), repair=True) for shard, one in batch
            )
            return _outcome([await self._add(delta, item) for delta, item in zip(deltas, items, strict=True)])
        size = sum(len(entry.payload) for _, entry in batch)
        self.run.counters.bytes_sent += size
        body = list_if_small(self._bodies(batch), size)
        async with self.rpc.request("repair", owner, OfferedDeltas(deltas), body) as answer:
            return self.rpc.decoded(owner, answer.head, OfferedDeltasAnswer)

    def _bodies(self, batch: list[Logged]) -> Iterator[Buffer]:
        is_batch = self.store.holds_values
        for shard, entry in batch:
            yield from logged_frames(shard, bytes(entry.payload), entry.codec, entry.identity.step, is_batch=is_batch)

    def _report_lost(self, shard: int, copy: SupersededCopy, lost: Applied) -> None:
        count = lost.count()
        # Promise 5: what the log does not reach is counted.
        self.run.counters.lost_in_splits += count - copy.reported
        if count > copy.reported:
            spans = _by_span(lost)[:MAX_LISTED]
            named = [f"{node.hex()[:8]}/{start}:{low}-{high}" for node, start, ((low, high),) in spans]
            reach = round(self.store.log.reach_s, 1)
            self._log.error("deltas_lost_in_split", shard=shard, count=count, deltas=named, reach_s=reach)
        copy.reported = count
        self._mended.append(count)

    # -- answers to the other side ------------------------------------------------------------------------------

    async def _on_offer_repair(self, _sender: Contact, message: ShardList, _stream: AsyncIterator[Buffer]) -> Response:
        shards = [shard for shard in message.shards if shard < len(self.store)]
        body = (buffer for shard in shards for buffer in record_frames(shard, self.history(shard)))
        return Response(encode(ShardList(shards)), body)

    def history(self, shard: int) -> OwnedHistory:
        """What this node has of a shard that it owns; otherwise who owns it, or that it cannot tell now."""
        owned = self.store.owned.get(shard)
        if owned is None:
            return OwnedHistory(shard, "not_owner", owner_info=self.store.redirect(shard))
        # Promise 1: what its backup may lack counts for nothing yet.
        if owned.moving or lacks_backup(self.view, owned):
            return OwnedHistory(shard, "retry")
        state = owned.state
        known = identities_of(state)
        return OwnedHistory(
            shard,
            "owner",
            owned.term,
            state.era_step,
            Term(*state.era_term),
            known.rows(),
            known_count=state.known_count,
            unlisted=state.unlisted,
            before=known.before,
        )

    async def _on_offered_deltas(
        self, sender: Contact, message: OfferedDeltas, stream: AsyncIterator[Buffer]
    ) -> Response:
        outcomes, reader = list[PushStatus](), FrameReader(stream)
        for logged in message.deltas:
            if logged.shard >= len(self.store):
                break
            item = await read_item(reader, logged.shard, self.store.size(logged.shard), repair=True)
            self.run.counters.bytes_received += len(item.encoded)
            outcomes.append(await self._add(logged, item))
        answer = _outcome(outcomes)
        if answer.added:
            self.run.counters.repaired += answer.added
            self._log.info("deltas_repaired", count=answer.added, source=sender.node_id.hex()[:8])
        return Response(encode(answer))

    async def _add(self, logged: LoggedDelta, item: IncomingDelta) -> PushStatus:
        """Add a delta of a repair. `retry`: it may be added later; `refused`: never."""
        # Promise 7: an absurd step changes nothing.
        if logged.step > MAX_BELIEVED:
            return "refused"
        weight = logged.weight
        if self.settings.weight != "sum":
            weight = self.view.merged_weight(weight, logged.workers)  # each side had counted its own workers alone
        push = Push(
            node=logged.node,
            incarnation=logged.incarnation,
            step=logged.step,
            base_step=logged.step,
            weight=weight,
            shards=[logged.shard],
        )
        (result,) = await self.deltas.accept(push, [item])
        return result.status

    async def _on_request_repair(
        self, _sender: Contact, message: FindDeltas, _stream: AsyncIterator[Buffer]
    ) -> Response:
        shard, log = message.shard, self.store.log
        work = VALUES_PER_ROW * len(message.identities)
        found = await off_loop(self.environment.executor, work, log.those_of, log.entries(shard), message.identities)
        batch = first_batch([(shard, entry) for entry in found])
        answer = FoundDeltas([_as_message(*one) for one in batch])
        size = sum(len(entry.payload) for _, entry in batch)
        return Response(encode(answer), list_if_small(self._bodies(batch), size))


def _outcome(outcomes: list[PushStatus]) -> OfferedDeltasAnswer:
    refused = [place for place, outcome in enumerate(outcomes) if outcome == "refused"]
    return OfferedDeltasAnswer(outcomes.count("ok"), refused)


def first_batch(deltas: list[Logged]) -> list[Logged]:
    """The first of these deltas, as many as one request carries; one at least."""
    size = 0
    for count, (_, entry) in enumerate(deltas[:MAX_DELTAS]):
        size += len(entry.payload)
        if count and size > MAX_BATCH_BYTES:
            return deltas[:count]
    return deltas[:MAX_DELTAS]


def _by_span(identities: Applied) -> Identities:
    """A row for each range: a difference of sets has more ranges of one start than a row of a message."""
    return [(node, start, [span]) for node, start, ranges in identities.rows() for span in ranges]


def _as_message(shard: int, entry: LogEntry) -> LoggedDelta:
    return LoggedDelta(shard, *entry.identity, entry.weight, max(1.0, entry.workers))
