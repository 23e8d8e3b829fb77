"""Pulls published values by way of other nodes, and hands them down to others: request `follow`.

In a swarm of more than `exchange.relay_above` nodes a node does not pull from every owner. It asks a few others for
what they have received (`training.exchange.aggregation.pull_sources`), and takes it as it takes an answer of the owner:
only what leads from the bits that it holds to the owner's digest. What the node that is asked has not, or has too old,
is asked for at a second one, and then at the owner. So is what a silent one was asked for, which is left out for a
while.

A node that is asked sends changes that it has received, encoded as they were. It asks nobody for that. While it pulls
itself it waits a moment for what it is asked for, so that nodes that pull together get what is new together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from overlay.peers import Contact
from overlay.transport import Buffer, Response, TransportError
from training.encoding.frames import (
    BadFrame,
    FrameReader,
    Part,
    encoded_frames,
    framed_bytes,
    new_memory,
    sized,
)
from training.encoding.pull_codecs import follows_chains
from training.exchange.aggregation import pull_sources
from training.exchange.aggregation.follow_messages import Follow, FollowAnswer
from training.exchange.aggregation.handed_down import Answered, HandedDown
from training.exchange.aggregation.pull_sources import Groups, PullSources
from training.exchange.aggregation.relays import AVOIDED_S, DISBELIEVED_S, ROUTES_S, UNABLE_S
from training.exchange.aggregation.routes import RouteTable
from training.exchange.client.follower import Arrays, ChainFollower
from training.exchange.context import ExchangeContext
from training.exchange.messages import PullResult, Wanted, encode
from training.exchange.owner.reads import ReadHandler
from training.exchange.step_wait import StepWait
from training.exchange.store.replica import NO_POSITION
from training.exchange.terms import MAX_BELIEVED
from training.exchange.trust import Untrue


@dataclass(slots=True)
class RelayedPull:
    """One pull as far as other nodes than owners are asked. `waiting`: the shards that it waits for; `settle` takes one
    out, and hears whether it has changed."""

    wait: StepWait
    waiting: Mapping[int, None]
    settle: Callable[[int, bool], None]
    #: The oldest value that was settled, in seconds.
    age_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Waiter:
    """Somebody waits for shards that this node pulls."""

    shards: dict[int, None]
    done: asyncio.Event = field(default_factory=asyncio.Event)


class PullRelays:
    """Asks other nodes for published values, and answers those that ask this one."""

    def __init__(self, context: ExchangeContext, follower: ChainFollower, reads: ReadHandler) -> None:
        """`reads` answers about the shards of this node."""
        self._context = context
        self._reads = reads
        self._swarm = context.swarm
        self._store = context.store
        self._replica = context.replica
        self._view = context.view
        self._rpc = context.rpc
        self._counters = context.counters
        self._clock = context.environment.clock
        self._log = context.environment.log
        self._follower = follower
        follower.on_mismatch = self._mismatched
        self.handed = HandedDown()
        self.sources = PullSources()
        self._routes: tuple[float, RouteTable | None] | None = None
        #: Shards that this node pulls now, and who waits for them.
        self._pulled: Mapping[int, None] = {}
        self._waiters: dict[_Waiter, None] = {}
        #: Bytes per value of the shortest change that any owner has made, in the pull before and in this one.
        self._shortest = [pull_sources.LONGEST_CHANGE] * 2
        #: Results of others that are being taken, and whose they are.
        self._taken: dict[int, tuple[PullResult, bytes]] = {}

    def register(self) -> None:
        """Register the request handler. A node that asks nobody this way answers those who do."""
        if not self._store.holds_values:
            self._rpc.register("follow", Follow, self._on_follow, waits=True)

    # -- whom to ask ----------------------------------------------------------------------------------------------

    def routes(self) -> RouteTable | None:
        """The nodes that are asked; None in a swarm that is small enough for each node to pull from every owner."""
        now_s = self._clock.monotonic()
        if self._routes is None or now_s - self._routes[0] > ROUTES_S:
            self._routes = now_s, self._table(now_s)
        return self._routes[1]

    def _table(self, now_s: float) -> RouteTable | None:
        context = self._context
        settings = context.settings
        if context.synchronous or not 0 < settings.relay_above < self._view.population():
            return None
        if not follows_chains(settings, context.codec.codec):
            return None
        self.sources.drop_past(now_s)
        median_s = self._view.median_step_seconds()
        fit = (
            peer.node_id
            for peer in self._swarm.members()
            if peer.is_worker(now_s)
            and pull_sources.is_quick(peer.step_seconds, median_s)
            and not self.sources.is_avoided(peer.node_id, now_s)
            and not self._view.is_gone(peer.node_id)
        )
        return RouteTable(self._swarm.node_id, fit, self._view.population(), settings.relay_bits)

    def divided(self, groups: Groups, without: bytes = b"") -> tuple[Groups, Groups]:
        """Shards grouped by owner, as those that are to be pulled from their owners, and those that others are asked
        for. A shard that this node holds no published value of has to come whole, and as a backup it compares what the
        owner itself says. `without`: a node that has been asked already; otherwise an owner is drawn for a check."""
        if (routes := self.routes()) is None:
            return groups, []
        backed, position_of = self._store.backed, self._replica.position_of
        me, backed, position_of = self._swarm.node_id, self._store.backed, self._replica.position_of
        others = [group for group in groups if group[0].node_id != me]
        owner_of = {shard: owner for owner, shards in others for shard in shards}
        hold = {shard: None for shard in owner_of if shard not in backed and position_of(shard) != NO_POSITION}
        direct, ways = pull_sources.divide(others, routes, hold, (without,), self._swarm.contact)
        if not without:
            direct, ways = self._with_check(direct, ways, owner_of)
        return [*(group for group in groups if group[0].node_id == me), *direct], ways

    def _with_check(self, direct: Groups, ways: Groups, owner_of: dict[int, Contact]) -> tuple[Groups, Groups]:
        """The same, but one shard that others would be asked for is pulled from its owner."""
        ids = {shard: owner.node_id for shard, owner in owner_of.items()}
        checked = pull_sources.drawn(ways, ids, self._context.environment.entropy.random)
        if checked is None:
            return direct, ways
        found = {owner.node_id: (owner, shards) for owner, shards in direct}
        found.setdefault(ids[checked], (owner_of[checked], []))[1].append(checked)
        return list(found.values()), pull_sources.without_shard(ways, checked)

    # -- pulls ----------------------------------------------------------------------------------------------------

    def begin(self, waiting: Mapping[int, None]) -> None:
        """This node pulls these shards, and takes out of them what has arrived."""
        self._pulled = waiting
        if self._shortest[1] < pull_sources.LONGEST_CHANGE:
            self._shortest = [self._shortest[1], pull_sources.LONGEST_CHANGE]

    def settled(self, shard: int) -> None:
        """A shard has arrived."""
        for waiter in list(self._waiters):
            if shard in waiter.shards:
                del waiter.shards[shard]
                if not waiter.shards:
                    waiter.done.set()

    def end(self) -> None:
        """The pull has ended, also for what has not arrived."""
        self._pulled = {}
        for waiter in self._waiters:
            waiter.done.set()

    async def ask(self, to: Contact, shards: list[int], pull: RelayedPull) -> None:
        """Ask a node for shards, and take what it has. What does not come is left in `pull.waiting`."""
        replica, now_s = self._replica, self._clock.monotonic()
        wanted = []
        for shard in shards:
            term, version = replica.version_of(shard)
            position = replica.position_of(shard)
            wanted.append(Wanted(shard, *term, version, position.chain, position.published))
        try:
            async with self._rpc.request("follow", to, Follow(self._context.genesis, wanted)) as answer:
                found = await self._rpc.decoded(to, answer.head, FollowAnswer)
                self._check(found, shards)
                reader = FrameReader(answer.body)
                coming = tuple(result.shard for result in found.results if result.status == "changes")
                with pull.wait.watching((to.node_id, coming), coming, received_since(answer.body)):
                    for result, age_ms in zip(found.results, found.ages_ms, strict=True):
                        arrays = await self._read(reader, result)
                        await self._take(to, result, arrays, now_s - age_ms / 1000.0, pull)
                        if arrays:
                            pull.wait.note(coming)
        except TransportError as error:
            self._failed(to, error)
        except BadFrame as error:
            if isinstance(error, Untrue):
                self._context.lied(to.node_id, "value")
            else:
                self._context.misbehaved(to.node_id, "follow")
            self._log.warning("bad_follow_answer", source=to.node_id.hex()[:8], reason=str(error))
            self._avoid(to.node_id, AVOIDED_S)

    def _check(self, answer: FollowAnswer, shards: list[int]) -> None:
        """Raise `BadFrame` for what does not answer the question."""
        results, asked = answer.results, dict.fromkeys(shards)
        if len(answer.ages_ms) != len(results) or len({result.shard for result in results}) != len(results):
            raise BadFrame(f"{len(answer.ages_ms)} ages of {len(results)} results")
        for result in results:
            if result.shard not in asked or result.status not in ("same", "changes", "retry"):
                raise BadFrame(f"shard {result.shard} was not asked for, or is {result.status}")
            is_plausible = self._store.ownership.is_plausible
            if not (is_plausible(result.term) and is_plausible(result.rank_term)):
                raise BadFrame(f"shard {result.shard} under term {result.term_number}")
            if max(result.version, result.published) >= MAX_BELIEVED:
                raise Untrue(f"shard {result.shard} in version {result.version}")

    async def _read(self, reader: FrameReader, result: PullResult) -> Arrays:
        if result.status != "changes":
            return []
        arrays, payload_bytes = await self._follower.read(reader, result, new_memory, has_checksum=False)
        self._counters.bytes_received += payload_bytes
        return arrays

    async def _take(self, to: Contact, result: PullResult, arrays: Arrays, date_s: float, pull: RelayedPull) -> None:
        """Take what is new of one shard, if its owner is the one that this node knows. It is settled unless it is too
        old: then somebody else is asked for what came since."""
        known = self._store.ownership.known_owners.get(result.shard)
        if self.sources.is_untrue(result, date_s):
            self._sent_old_values(to.node_id, result.shard)
            return
        routes = self.routes()
        if result.status == "retry" or known is None or known.term != result.term or routes is None:
            return
        self._taken[result.shard] = result, to.node_id
        try:
            if result.status == "same" and not self._follower.is_same(result):
                return
            if result.status == "changes" and not await self._follower.take(result, arrays):
                return
        finally:
            self._taken.pop(result.shard, None)
        if to.node_id == known.owner.node_id:
            self.sources.heard(result, self._clock.monotonic())
        else:
            self.sources.took(result, to.node_id, date_s)
        self._keep(known.owner.node_id, result, date_s, arrays)
        age_s, relays = self._clock.monotonic() - date_s, routes.relays_to(known.owner.node_id)
        if age_s <= pull_sources.oldest_s(relays, self._view.median_step_seconds()) and result.shard in pull.waiting:
            pull.age_s = max(pull.age_s, age_s)
            pull.settle(result.shard, bool(arrays))

    def heard(self, owner: Contact, result: PullResult, asked_s: float, arrays: Arrays) -> None:
        """An owner that was asked itself at this moment has answered with a published value, which was taken."""
        if not self._context.settings.relay_above or not result.chain:
            return
        step_s = self._view.median_step_seconds()
        tick_s = pull_sources.tick_s(min(self._shortest), step_s)
        if (late := self.sources.heard(result, self._clock.monotonic(), tick_s, step_s)) is not None:
            self._sent_old_values(late, result.shard)
        self._keep(owner.node_id, result, asked_s, arrays)

    def _keep(self, owner: bytes, result: PullResult, date_s: float, arrays: Arrays) -> None:
        routes = self.routes()
        if result.status == "changes":
            longs = (len(encoded) / max(1, self._store.size(result.shard)) for _, encoded in arrays)
            self._shortest[1] = min(self._shortest[1], *longs)
        if routes is not None and routes.is_on_the_way(owner):
            self.handed.note(result, date_s, self._store.size(result.shard), arrays)
        else:
            self.handed.forget(result.shard)

    # -- whom not to ask ------------------------------------------------------------------------------------------

    def _mismatched(self, result: PullResult) -> None:
        """A result does not fit the bits of the replica: the shard is pulled whole from its owner. It may be wrong
        itself, or what it follows was."""
        taken, by = self._taken.get(result.shard, (None, b""))
        giver = self.sources.giver(result)
        if taken is result and giver != by:
            self._avoid(by, AVOIDED_S)  # it may be right
        elif giver is not None and self._disbelieve(giver):
            self._log.warning("relay_sent_wrong_values", source=giver.hex()[:8], shard=result.shard)

    def _sent_old_values(self, node: bytes, shard: int) -> None:
        if self._disbelieve(node):
            self._log.warning("relay_sent_old_values", source=node.hex()[:8], shard=shard)

    def _disbelieve(self, node: bytes) -> bool:
        """A node, or one behind it, has handed down what is not true; False if that is known already."""
        if self.sources.is_avoided(node, self._clock.monotonic() + UNABLE_S):
            return False
        self._avoid(node, DISBELIEVED_S)
        return True

    def _failed(self, to: Contact, error: TransportError) -> None:
        self._avoid(to.node_id, UNABLE_S if error.is_not_served else AVOIDED_S)
        if error.kind != "rejected":
            self._swarm.suspect(to.node_id, error.detail)
        self._log.debug("source_failed", source=to.node_id.hex()[:8], kind=error.kind, reason=error.detail)

    def _avoid(self, node: bytes, seconds: float) -> None:
        self.sources.avoid(node, self._clock.monotonic() + seconds)
        self._routes = None

    # -- requests -------------------------------------------------------------------------------------------------

    async def _on_follow(self, sender: Contact, message: Follow, _stream: AsyncIterator[Buffer]) -> Response:
        count = len(self._store)
        if any(wanted.shard >= count for wanted in message.shards):
            raise BadFrame(f"asks for shards beyond {count}")
        own = await self._reads.followed(sender, message.shards)
        await self._pulled_here([wanted.shard for wanted in message.shards if wanted.shard not in own])
        now_s = self._clock.monotonic()
        answers = []
        for wanted in message.shards:
            if (followed := own.get(wanted.shard)) is None:
                answers.append(self.handed.answer(wanted, now_s))
            elif followed.changes is not None:
                answers.append(Answered(followed.result, 0.0, followed.changes))
            else:
                answers.append(Answered(PullResult(wanted.shard, "retry"), 0.0))
        # Rounded up: no value is newer than it is said to be.
        head = FollowAnswer([one.result for one in answers], [1 + int(1000.0 * one.age_s) for one in answers])
        self._counters.handed_down += sum(
            one.result.shard not in own and one.result.status != "retry" for one in answers
        )
        size = sum(
            framed_bytes(change.codec, self._store.size(one.result.shard), len(change.payload))
            for one in answers
            for change in one.changes
        )
        return Response(encode(head), sized(self._frames(answers), size))

    async def _pulled_here(self, shards: list[int]) -> None:
        """Wait a moment for those of these shards that this node pulls now."""
        missing = {shard: None for shard in shards if shard in self._pulled}
        if not missing:
            return
        waiter = _Waiter(missing)
        self._waiters[waiter] = None
        try:
            async with asyncio.timeout(pull_sources.wait_s(self._view.median_step_seconds())):
                await waiter.done.wait()
        except TimeoutError:
            pass
        finally:
            del self._waiters[waiter]

    def _frames(self, answers: list[Answered]) -> Iterator[Buffer]:
        for one in answers:
            shard = one.result.shard
            for change in one.changes:
                for buffer in encoded_frames(shard, change.payload, change.codec, Part.CHANGE, version=change.version):
                    self._counters.bytes_sent += len(buffer)
                    yield buffer


def received_since(body: Any) -> Callable[[], int]:
    """The bytes of a body that have arrived since now; always 0 for one that does not count them."""
    before = getattr(body, "received_bytes", 0)
    return lambda: getattr(body, "received_bytes", before) - before
