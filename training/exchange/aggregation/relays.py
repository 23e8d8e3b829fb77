"""Hands deltas on to the owners of their shards, in bundles: one request at a time to each next node.

A node gives its own deltas to its relays (`deliver`), and other nodes send theirs (request `relay`). What is for
shards of this node is added as a push is. The rest waits in a queue for each next node (`aggregation.routes`). A
bundle takes all that waits when the one before has its answers: so there are as many requests as a next node can
answer, not as there are deltas.

A relay promises nothing. It answers only what owners have answered, and its answer comes when theirs have come. What
it cannot deliver at the first attempt is answered `retry`, and what a dead relay had is not answered. Then the
origin, which has kept its delta, sends it to the owner itself, under the same identity. Whatever arrives twice is
known there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain

import msgspec

from overlay.addresses import Address
from overlay.peers import Contact
from overlay.transport import Buffer, RequestRejected, Response, TransportError
from training.encoding.frames import BadFrame, FrameReader, Part, encoded_frames, read_encoded, sized
from training.exchange.aggregation.bundles import (
    MAX_HOPS,
    Carried,
    Relay,
    RelayAnswer,
    Results,
    read_pieces,
)
from training.exchange.aggregation.consignments import Consignment, Note, Unanswered, Way
from training.exchange.aggregation.delivery_checks import DeliveryChecks, Reported
from training.exchange.aggregation.results_stream import ResultsStream
from training.exchange.aggregation.routes import RouteTable, comes_closer
from training.exchange.context import ExchangeContext
from training.exchange.cooperative import VALUES_PER_PART
from training.exchange.directory import OwnerDirectory
from training.exchange.messages import Push, PushResult, encode
from training.exchange.owner.delta_item import IncomingDelta
from training.exchange.owner.deltas import DeltaHandler

#: How long a table of next nodes is used.
ROUTES_S = 1.0
#: A next node that failed is left out for this long, and one that knows no relays (of an earlier version) longer.
AVOIDED_S, UNABLE_S = 10.0, 300.0
#: One that has reported a delta as delivered that its owner has not got.
DISBELIEVED_S = 600.0
#: One that says for so long that it is at work, and has no result, is given up, and left out as long as one that knows
#: no relays.
RESULTS_WITHIN_S = 30.0
#: A relay lets foreign deltas wait for others for this share of the median step, and not longer than this.
GATHER_SHARE, GATHER_MOST_S = 0.05, 1.0
#: Encoded bytes of others that one node holds.
MAX_HELD_BYTES = 256 * 1024 * 1024

#: In place of an owner: what is handed to the next nodes, whoever owns it.
RELAYED = Contact(b"relayed", Address("", 0))

#: Shards grouped by the node that they are sent to.
Groups = list[tuple[Contact, list[int]]]


class DeltaRelays:
    """Delivers deltas of this node and of others by way of other nodes, and those for its own shards."""

    def __init__(self, context: ExchangeContext, directory: OwnerDirectory, deltas: DeltaHandler) -> None:
        self._context = context
        self._swarm = context.swarm
        self._store = context.store
        self._view = context.view
        self._rpc = context.rpc
        self._clock = context.environment.clock
        self._log = context.environment.log
        self._directory = directory
        self._deltas = deltas
        self._ways: dict[bytes, Way] = {}
        self.checks = DeliveryChecks(context, directory, self._on_missing)
        self._streams: dict[ResultsStream, None] = {}
        self._held_bytes = 0
        self._routes: tuple[float, RouteTable | None] | None = None
        #: Next nodes that are left out, until when.
        self._avoided: dict[bytes, float] = {}

    def register(self) -> None:
        """Register the request handler. A node that sends nothing this way hands on what others send."""
        if not self._store.holds_values:
            self._rpc.register("relay", Relay, self._on_relay, waits=True)

    # -- whom to send to ------------------------------------------------------------------------------------------

    def routes(self) -> RouteTable | None:
        """The next nodes of this one; None in a swarm that is small enough for each node to send to every owner."""
        now_s = self._clock.monotonic()
        if self._routes is None or now_s - self._routes[0] > ROUTES_S:
            self._routes = now_s, self._table(now_s)
        return self._routes[1]

    def _table(self, now_s: float) -> RouteTable | None:
        above, members = self._context.settings.relay_above, self._swarm.members()
        population = self._view.population()
        if not above or population <= above or self._store.holds_values:
            return None
        self._avoided = {node: until_s for node, until_s in self._avoided.items() if now_s < until_s}
        fit = (
            peer.node_id
            for peer in members
            if self._swarm.may_own(peer) and peer.node_id not in self._avoided and not self._view.is_gone(peer.node_id)
        )
        return RouteTable(self._swarm.node_id, fit, population, self._context.settings.relay_bits)

    def joined(self, groups: Groups, direct: Iterable[int]) -> Groups:
        """Shards grouped by owner, but for those that are to be relayed, which make one group for `RELAYED`. Those of
        `direct` are not."""
        if (routes := self.routes()) is None:
            return groups
        found, relayed, excepted = Groups(), list[int](), {*direct}
        for owner, shards in groups:
            if owner.node_id == self._swarm.node_id or routes.hop(owner.node_id) is None:
                found.append((owner, shards))
                continue
            relayed += [shard for shard in shards if shard not in excepted]
            if rest := [shard for shard in shards if shard in excepted]:
                found.append((owner, rest))
        return [*found, (RELAYED, relayed)] if relayed else found

    def _next(self, owner: Contact, hops: int) -> Contact:
        """Whom a delta for this owner is handed to."""
        routes = self.routes()
        hop = None if routes is None or hops >= routes.levels else routes.hop(owner.node_id)
        return owner if hop is None else self._swarm.contact(hop) or owner

    # -- deltas ---------------------------------------------------------------------------------------------------

    async def deliver(
        self, push: Push, items: Sequence[Carried], note: Note, hops: int = 0, before: bytes = b""
    ) -> None:
        """Deliver some shards of a delta; `note` hears of each result, and has heard of all when this returns.

        `before`: the node that has handed them on to this one, and waits for the results.

        What is not answered `ok` or `refused` is to be sent to its owner by the origin. The memory of the items must
        not change, also if this is cancelled.
        """
        unanswered = Unanswered([item.shard for item in items], note)
        by_shard = {item.shard: item for item in items}
        groups, unknown = self._directory.by_owner(by_shard)
        try:
            unanswered.answer(PushResult.retry(shard, "owner_unknown") for shard in unknown)
            own: list[Carried] = []
            ways: dict[bytes, tuple[Contact, list[Carried]]] = {}
            for owner, shards in groups:
                if owner.node_id == self._swarm.node_id:
                    own += [by_shard[shard] for shard in shards]
                    continue
                to = self._next(owner, hops)
                if before and not comes_closer(self._swarm.node_id, before, to.node_id):
                    # The node before took another node for the owner, this one perhaps. It may wait for itself.
                    unanswered.answer(PushResult.retry(shard, "not_relayed") for shard in shards)
                    continue
                ways.setdefault(to.node_id, (to, []))[1].extend(by_shard[shard] for shard in shards)
            for to, theirs in ways.values():
                self._send_soon(to, Consignment(push, theirs, hops, unanswered))
            await self._add(push, own, unanswered)
            await unanswered.done.wait()
        finally:
            unanswered.close()
        if not hops:
            self.checks.begin()

    async def _add(self, push: Push, items: list[Carried], unanswered: Unanswered) -> None:
        """Add the shards that this node owns, a part at a time."""
        turns, executor = self._context.turns, self._context.environment.executor
        part, values = list[IncomingDelta](), 0
        for number, item in enumerate(items, 1):
            received = IncomingDelta.received
            part.append(
                await turns.run(executor, item.values, received, item.shard, item.encoded, item.codec, item.values)
            )
            values += item.values
            if values >= VALUES_PER_PART or number == len(items):
                unanswered.answer(await self._deltas.accept(push, part))
                part, values = [], 0

    def _send_soon(self, to: Contact, consignment: Consignment) -> None:
        way = self._ways.setdefault(to.node_id, Way(to))
        way.to = to
        way.waiting.append(consignment)
        if way.task is None:
            way.task = asyncio.create_task(self._empty(way), name=f"relay-{to.node_id.hex()[:8]}")

    async def _empty(self, way: Way) -> None:
        """Send all that waits for one next node, until nothing does."""
        try:
            while way.waiting:
                if any(one.hops for one in way.waiting):
                    await asyncio.sleep(self._gather_s())
                batch = way.take()
                if batch and not await self._send(way.to, batch):
                    way.give_up()
        finally:
            way.give_up()
            if self._ways.get(way.to.node_id) is way:
                del self._ways[way.to.node_id]

    def _gather_s(self) -> float:
        return min(GATHER_SHARE * self._view.median_step_seconds(), GATHER_MOST_S)

    async def _send(self, to: Contact, batch: list[Consignment]) -> bool:
        """Send one bundle and note its answers; False if that failed."""
        pushes = [
            msgspec.structs.replace(
                one.push,
                shards=[item.shard for item in one.items],
                fences=[],
                streams=False,
                keeps=False,
            )
            for one in batch
        ]
        hops = min(MAX_HOPS, 1 + max(one.hops for one in batch))
        body = sized(self._frames(batch), sum(item.framed_bytes for one in batch for item in one.items))
        asked_s = self._clock.monotonic()
        try:
            async with self._rpc.request("relay", to, Relay(self._context.genesis, hops, pushes), body) as answer:
                await self._rpc.decoded(to, answer.head, RelayAnswer)
                self._context.counters.relayed += sum(len(one.items) for one in batch if one.hops)
                since_s = self._clock.monotonic()
                async for pieces in read_pieces(answer.body):
                    self._note(to, batch, pieces, asked_s)
                    if pieces:
                        since_s = self._clock.monotonic()
                    elif all(one.unanswered.is_closed for one in batch):
                        break  # it does not end its answer
                    elif self._clock.monotonic() - since_s > RESULTS_WITHIN_S:
                        self._avoid(to.node_id, UNABLE_S)
                        raise TransportError("timeout", to.address, f"had no result for {RESULTS_WITHIN_S:g} s")
        except TransportError as error:
            self._failed(to, error)
            return False
        except BadFrame as error:
            self._context.misbehaved(to.node_id, "relay")
            self._log.warning("bad_relay_answer", source=to.node_id.hex()[:8], reason=str(error))
            self._avoid(to.node_id, AVOIDED_S)
            return False
        finally:
            for one in batch:
                one.give_up()
        return True

    def _frames(self, batch: list[Consignment]) -> Iterator[Buffer]:
        for one in batch:
            step = one.push.step
            for buffer in chain.from_iterable(
                encoded_frames(item.shard, item.encoded, item.codec, Part.DELTA, step=step) for item in one.items
            ):
                self._context.counters.bytes_sent += len(buffer)
                yield buffer

    def _note(self, to: Contact, batch: list[Consignment], pieces: list[Results], asked_s: float) -> None:
        """Some results have come, or a sign of life. Raises `BadFrame` for those of a push that was not sent."""
        known_owners = self._store.ownership.known_owners
        for place, results in pieces:
            if not 0 <= place < len(batch):
                raise BadFrame(f"an answer to push {place} of {len(batch)}")
            batch[place].answer(results)
            if not batch[place].hops:
                self._check(to.node_id, batch[place].push, results)
            own = [result for result in results if result.shard < len(self._store)]
            self._directory.answered(
                to,
                [
                    result
                    for result in own
                    if (known := known_owners.get(result.shard)) is not None
                    and known.owner.node_id == to.node_id
                    and not _names(to, result)
                ],
                asked_s,
            )
        if not pieces:
            for one in batch:
                one.unanswered.sign_of_life()

    def _check(self, relay: bytes, push: Push, results: list[PushResult]) -> None:
        """A relay has answered about a delta of this node."""
        known_owners = self._store.ownership.known_owners
        for result in results:
            known = known_owners.get(result.shard)
            if result.status == "ok" and known is not None and known.owner.node_id != relay:
                self.checks.note(relay, push, result)

    def _on_missing(self, one: Reported) -> None:
        """A relay, or one behind it, has not delivered what it has reported. All that may have gone that way is to be
        sent to its owner, if that lacks it: as if the relay had owned the shard (see `recovery.resending`)."""
        routes, count = self.routes(), 0
        for key, delta in self._context.acknowledged:
            is_other = routes is not None and routes.hop(delta.owner) == one.relay
            if is_other or (key.shard, key.identity) == (one.shard, one.identity):
                self._context.acknowledged.moved(key, one.relay)
                count += 1
        self._avoid(one.relay, DISBELIEVED_S)
        self._log.warning("relay_kept_delta", source=one.relay.hex()[:8], step=one.identity.step, count=count)

    def _failed(self, to: Contact, error: TransportError) -> None:
        """A next node did not answer: others are handed to, and what it had goes to the owners directly."""
        self._avoid(to.node_id, UNABLE_S if error.is_not_served else AVOIDED_S)
        if error.kind != "rejected":
            self._swarm.suspect(to.node_id, error.detail)
        self._log.debug("relay_failed", source=to.node_id.hex()[:8], kind=error.kind, reason=error.detail)

    def _avoid(self, node: bytes, seconds: float) -> None:
        self._avoided[node] = max(self._clock.monotonic() + seconds, self._avoided.get(node, 0.0))
        self._routes = None

    # -- requests -------------------------------------------------------------------------------------------------

    async def _on_relay(self, sender: Contact, message: Relay, stream: AsyncIterator[Buffer]) -> Response:
        if self._held_bytes > MAX_HELD_BYTES:
            raise RequestRejected("this node holds too many deltas of others already")
        count, reader = len(self._store), FrameReader(stream)
        received: list[list[Carried]] = []
        held = ResultsStream(partial(self.deliver, before=sender.node_id), self._forget)
        self._streams[held] = None
        try:
            for push in message.pushes:
                if message.hops == 1 and push.node != sender.node_id:
                    self._context.lied(sender.node_id, "relay")
                    raise RequestRejected("a delta of another node, which no node has handed on")
                if any(shard >= count for shard in push.shards):
                    raise BadFrame(f"a push of shards beyond {count}")
                items = []
                for shard in push.shards:
                    size = self._store.size(shard)
                    encoded, codec = await read_encoded(reader, shard, Part.DELTA, size)
                    self._context.counters.bytes_received += len(encoded)
                    held.size_bytes += len(encoded)
                    self._held_bytes += len(encoded)
                    items.append(Carried(shard, encoded, codec, size))
                received.append(items)
            for place, (push, items) in enumerate(zip(message.pushes, received, strict=True)):
                held.begin(place, push, items, message.hops)
        except BaseException:
            await held.aclose()
            raise
        return Response(encode(RelayAnswer(self._context.genesis)), held)

    def _forget(self, stream: ResultsStream) -> None:
        if stream in self._streams:
            del self._streams[stream]
            self._held_bytes -= stream.size_bytes

    async def halt(self) -> None:
        """Hand on nothing more: what has no answer yet is given up."""
        tasks = [way.task for way in self._ways.values() if way.task is not None]
        for task in tasks:
            task.cancel()
        await self.checks.halt()
        await asyncio.gather(*tasks, *(stream.aclose() for stream in list(self._streams)), return_exceptions=True)


def _names(relay: Contact, result: PushResult) -> bool:
    """Whether a relay passes on that another node has named it as the owner: it has come to own the shard meanwhile.
    An owner that redirects to itself lies, but this is no answer of its own."""
    return result.owner_info is not None and result.owner_info.owner == relay.node_id
