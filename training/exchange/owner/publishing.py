"""Publishes the values of the shards of one owner as chains of changes (`training.exchange.owner.published`).

A chain begins when somebody who follows first asks for a shard, and is dropped when nobody has asked for long: the
published value costs as much memory as the value. A tick comes when somebody asks and something was added since the
last one, but no more often than followers can bear: they are sent about `BYTES_PER_STEP` per value and median step. Who
has the present version already is sent one change by a tick, and so waits half as long for it. Under bsp every barrier
is a tick, because the puller must see the deltas of its step.

At a hand-over the chain goes on at the new owner, which has followed it. Its replica has the published value, or lacks
changes that come with the hand-over. A node that has not followed, or takes over, begins a new chain.

Encoding, decoding and the digest run off the event loop. The value of the shard may change meanwhile: a change then has
some values before and some after a delta, and the next one corrects it, like everything that was rounded off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from overlay.transport import Buffer
from training.cooperative import VALUES_PER_PART, ThreadPauses
from training.encoding.codecs import CodecName, Vector
from training.encoding.frames import FrameReader, Part, encoded_frames, framed_bytes, read_encoded
from training.encoding.pull_codecs import WHOLE, change_codec
from training.exchange.context import ExchangeContext
from training.exchange.owner.published import CHAIN_BYTES, ApproximatedState, Change, Published, begin, continued, tick
from training.exchange.ownership_messages import HandOver, PublishedHead
from training.exchange.store.records import Owned
from training.exchange.store.replica import Position
from training.exchange.terms import MAX_BELIEVED

#: With int4, of 0.53 bytes per value, a tick comes about every step; smaller changes come more often.
BYTES_PER_STEP = 0.6
#: A chain that nobody has asked for during so many median steps, and at least so long, is dropped.
UNUSED_STEPS, UNUSED_S = 20.0, 120.0
#: Followers of a shard whose position is remembered.
MAX_FOLLOWERS = 64
#: An owner keeps the changes of a chain for followers that it does not know yet during so many median steps, and at
#: least so long: by then each has asked for the shard.
UNKNOWN_STEPS, UNKNOWN_S = 8.0, 10.0


@dataclass(slots=True)
class _Chain:
    """The published value of a shard, of one ownership of it; times in monotonic seconds."""

    owned: Owned
    published: Published
    ticked_at: float
    asked_at: float
    #: Since when this owner publishes it.
    since_s: float
    #: The published version that a follower had, at least, when it asked last, and when that was.
    followers: dict[bytes, tuple[int, float]] = field(default_factory=dict)
    #: Some are not among `followers`: there are too many.
    has_more: bool = False

    def note(self, follower: bytes, position: Position, now: float) -> None:
        """It named this position; without one in this chain it is being sent the whole."""
        is_here = position.chain == self.published.chain
        self.followers.pop(follower, None)
        self.followers[follower] = position.published if is_here else self.published.version, now
        if len(self.followers) > MAX_FOLLOWERS:
            del self.followers[next(iter(self.followers))]
            self.has_more = True

    def drop_changes(self, now: float, step_s: float) -> None:
        """Drop the changes that all have who follow."""
        if self.has_more or now - self.since_s < max(UNKNOWN_S, UNKNOWN_STEPS * step_s):
            return
        unused_s = max(UNUSED_S, UNUSED_STEPS * step_s)
        held = [version for version, asked_at in self.followers.values() if now - asked_at <= unused_s]
        if held:
            self.published = self.published.without_changes_to(min(held))


@dataclass(frozen=True, slots=True)
class _Due:
    """A tick to be made, or the beginning of a chain: where there is none to go on from."""

    shard: int
    owned: Owned
    former: Published | None
    name: bytes
    source: ApproximatedState

    def made(self, value: Vector, codec: CodecName, sparse_values: int) -> Published:
        if self.former is None:
            return begin(self.name, value, self.source)
        return tick(self.former, value, self.source, codec, sparse_values)


class Publisher:
    """The chains of the shards that this node owns. `choose` names the codec of the next change; while that is one for
    whole values nothing is published."""

    def __init__(self, context: ExchangeContext, choose: Callable[[], CodecName] | None = None) -> None:
        self._context = context
        self._store = context.store
        self._view = context.view
        self._clock = context.environment.clock
        self._entropy = context.environment.entropy
        self._executor = context.environment.executor
        self._choose = choose if choose is not None else lambda: change_codec(context.settings, context.codec.codec)
        self._chains: dict[int, _Chain] = {}
        #: Published values of shards that this node has handed over, until its next pull goes on from them.
        self._handed_on: dict[int, tuple[Published, float]] = {}
        self._one_at_a_time = asyncio.Lock()

    def published(self, shard: int) -> Published | None:
        """The published value of a shard that this node owns, if it has one, and if changes are chosen at all."""
        chain = self._chains.get(shard)
        if self._choose() in WHOLE:
            return None
        if chain is None or self._store.owned.get(shard) is not chain.owned:
            return None
        return chain.published

    def is_new(self, shard: int) -> bool:
        """Whether the followers of a shard hold the first published value of its chain."""
        published = self.published(shard)
        return published is not None and published.version == 0

    def first_value(self, shard: int, chain: bytes) -> Vector | None:
        """The first published value of a chain, which is never written to; None if the chain has gone on, or is
        another."""
        published = self.published(shard)
        return published.value if published is not None and (published.chain, published.version) == (chain, 0) else None

    async def publish(self, follower: bytes, asked: list[tuple[int, Position]]) -> None:
        """A node asks for shards, and has these positions: begin the chains that are missing, and make the ticks
        due."""
        await self._advance(asked)
        now, step_s = self._clock.monotonic(), self._view.median_step_seconds()
        for shard, position in asked:
            if self.published(shard) is not None:
                chain = self._chains[shard]
                chain.note(follower, position, now)
                chain.drop_changes(now, step_s)

    async def _advance(self, asked: Iterable[tuple[int, Position]]) -> None:
        codec = self._choose()
        if codec in WHOLE:
            return
        async with self._one_at_a_time:
            now, step_s = self._clock.monotonic(), self._view.median_step_seconds()
            part, values = list[_Due](), 0
            for shard, position in asked:
                if (one := self._due(shard, position, now, step_s)) is None:
                    continue
                part.append(one)
                values += self._store.size(shard)
                if values >= VALUES_PER_PART:
                    await self._make(part, codec, now)
                    part, values = [], 0
            if part:
                await self._make(part, codec, now)

    async def _make(self, due: list[_Due], codec: CodecName, now: float) -> None:
        """Make these ticks, and put each in the place of its former version: both are in memory meanwhile."""
        pauses = ThreadPauses(self._executor)
        made = await self._executor.run(_made, due, codec, self._context.settings.sparse_values, pauses)
        for one, published in zip(due, made, strict=True):
            # What was told to a new owner meanwhile is the version before.
            if self._store.owned.get(one.shard) is one.owned and not one.owned.moving:
                self._put(one.shard, one.owned, published, now)

    def _put(self, shard: int, owned: Owned, published: Published, now: float) -> None:
        chain = self._chains.get(shard)
        if chain is not None and chain.owned is owned:
            chain.published, chain.ticked_at, chain.asked_at = published, now, now
        else:
            self._chains[shard] = _Chain(owned, published, now, now, now)

    def _due(self, shard: int, position: Position, now: float, step_s: float) -> _Due | None:
        owned = self._store.owned.get(shard)
        if owned is None or owned.moving:
            # While the shard moves the value does not change, and the new owner goes on from this version.
            return None
        chain = self._chains.get(shard)
        former = None
        if chain is not None and chain.owned is owned:
            chain.asked_at = now
            former = chain.published
            is_old = former.source.version != owned.state.version
            patience_s = self._patience_s(former, step_s)
            if position == (former.chain, former.version):
                patience_s /= 2
            if not is_old or now - chain.ticked_at < patience_s:
                return None
        name = self._entropy.token(CHAIN_BYTES) if former is None else former.chain
        return _Due(shard, owned, former, name, ApproximatedState(owned.rank_term, owned.state.version))

    def _patience_s(self, published: Published, step_s: float) -> float:
        """Seconds between two ticks of a chain, by the size of its last change and the median step."""
        if self._context.synchronous:
            return 0.0
        return min(1.0, published.last_bytes_per_value / BYTES_PER_STEP) * step_s

    def drop_unused(self) -> None:
        """Drop the chains that nobody asks for any more, and those of shards that have another owner."""
        if not self._chains and not self._handed_on:
            return  # as where values are pulled whole
        now, unused_s = self._clock.monotonic(), max(UNUSED_S, UNUSED_STEPS * self._view.median_step_seconds())
        for shard, chain in list(self._chains.items()):
            if self._store.owned.get(shard) is not chain.owned or now - chain.asked_at > unused_s:
                del self._chains[shard]
        for shard, (_, handed_on_at) in list(self._handed_on.items()):
            if now - handed_on_at > unused_s:
                del self._handed_on[shard]

    # -- hand-over ----------------------------------------------------------------------------------------------

    def heads_for(self, new_owner: bytes, shards: Iterable[int]) -> tuple[list[PublishedHead], Iterator[Buffer], int]:
        """What a hand-over says of these shards, and its body, with its size: the last change of each, and all that the
        new owner may lack."""
        heads, sent = [], list[tuple[int, Published, Change]]()
        for shard in shards:
            published = self.published(shard)
            if published is None:
                heads.append(PublishedHead())
                continue
            # The last change in any case: other followers have not asked for it yet.
            last = max(0, published.version - 1)
            last_seen, _ = self._chains[shard].followers.get(new_owner, (last, 0.0))
            changes = published.since(min(last_seen, last)) or published.since(last) or ()
            sent += [(shard, published, change) for change in changes]
            term, version = published.source
            heads.append(
                PublishedHead(published.chain, published.version, published.digest, version, term, changes=len(changes))
            )

        def body() -> Iterator[Buffer]:
            for shard, _, change in sent:
                yield from encoded_frames(shard, change.payload, change.codec, Part.CHANGE, version=change.version)

        size = sum(
            framed_bytes(change.codec, published.value.size, len(change.payload)) for _, published, change in sent
        )
        return heads, body(), size

    async def read_heads(self, message: HandOver, sender: bytes, reader: FrameReader) -> dict[int, Published]:
        """The chains that go on here if the hand-over is accepted. Raises `BadFrame`."""
        work: list[tuple[int, Vector, tuple[Change, ...], Published]] = []
        for info, head in zip(message.shards, message.published, strict=False):
            if info.shard >= len(self._store):
                break
            changes = []
            for version in range(head.published - head.changes + 1, head.published + 1):
                size = self._store.size(info.shard)
                encoded, codec = await read_encoded(reader, info.shard, Part.CHANGE, size, version=version)
                changes.append(Change(version, codec, encoded))
            chain, held_version = self._context.replica.position_of(info.shard)
            lacking = head.published - held_version
            backed = self._store.backed.get(info.shard)
            if backed is None or backed.owner.node_id != sender:
                continue
            is_believed = self._store.ownership.is_plausible(head.rank)
            if not is_believed or max(head.version, head.published) >= MAX_BELIEVED:
                continue
            if not head.chain or chain != head.chain or not 0 <= lacking <= len(changes):
                continue
            source = ApproximatedState(head.rank, head.version)
            last = Published(head.chain, head.published, _NO_VALUE, head.digest, source, tuple(changes))
            missing = tuple(changes[len(changes) - lacking :])
            work.append((info.shard, self._context.replica.slice_of(info.shard), missing, last))
        return await self._executor.run(_continued, work) if work else {}

    def hand_on(self, shard: int) -> None:
        """The new owner has taken the shard, and its chain: this node follows from now on."""
        if (published := self.published(shard)) is not None:
            self._handed_on[shard] = published, self._clock.monotonic()

    def take_handed_on(self) -> dict[int, Published]:
        """What `hand_on` has noted since the last call, but for shards that this node owns again."""
        found, self._handed_on = self._handed_on, {}
        return {shard: published for shard, (published, _) in found.items() if shard not in self._store.owned}

    def go_on(self, shard: int, owned: Owned, published: Published) -> None:
        """This node owns the shard now, and goes on from the value that its followers hold."""
        self._put(shard, owned, published, self._clock.monotonic())

    @property
    def size_bytes(self) -> int:
        """Memory of all published values and their changes."""
        found = [chain.published for chain in self._chains.values()]
        found += [published for published, _ in self._handed_on.values()]
        return sum(published.value.nbytes + published.change_bytes for published in found)


_NO_VALUE: Vector = np.zeros(0, dtype=np.float32)


def _continued(work: list[tuple[int, Vector, tuple[Change, ...], Published]]) -> dict[int, Published]:
    found = ((shard, continued(held, missing, last)) for shard, held, missing, last in work)
    return {shard: published for shard, published in found if published is not None}


def _made(due: list[_Due], codec: CodecName, sparse_values: int, pauses: ThreadPauses) -> list[Published]:
    made = []
    for one in due:
        value = one.owned.state.value
        made.append(one.made(value, codec, sparse_values))
        pauses.after(value.size)
    return made
