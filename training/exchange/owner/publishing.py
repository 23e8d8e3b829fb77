"""Publishes the values of the shards of one owner, and their changes (`training.exchange.published`).

A publication begins when a shard is founded, or a follower first asks for it. It is dropped when nobody has asked for
long: the published value costs as much memory as the value.

A version is made when a follower asks, something was added since the last one, and that one is old enough. Followers
are sent about one change of the codec's usual size per median step; a smaller last change shortens the wait. A follower
with the newest version waits half as long: the next one costs it a single change. Under bsp every barrier makes a
version, because the puller must see the deltas of its step.

At a hand-over the publication goes on at the new owner, which has followed it. Its replica has the published value, or
lacks changes that come with the hand-over. A node that has not followed, or takes over, begins a new publication.

Encoding, decoding and the digest run off the event loop. The value of the shard may change meanwhile: a change then has
some values before and some after a delta, and the next one corrects it, like everything that was rounded off.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.transport import Buffer
from p2pnode.training.cooperative import VALUES_PER_PART, ThreadPauses, off_loop
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.frames import FrameReader, Part, encoded_frames, framed_bytes, read_encoded
from p2pnode.training.encoding.table import CODECS, CodecName
from p2pnode.training.exchange.ownership_messages import HandOver, PublishedHead
from p2pnode.training.exchange.published import (
    PUBLICATION_ID_BYTES,
    ApproximatedState,
    Change,
    Published,
    begin,
    begin_run,
    continued,
    next_version,
)
from p2pnode.training.exchange.run_state import SwarmView
from p2pnode.training.exchange.store.records import Owned
from p2pnode.training.exchange.store.replica import Position, Replica
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import MAX_BELIEVED

#: Of a median step: after it the next version is made, where the last change was as large as its codec's usually are.
#: Smaller changes come more often.
STEP_PART = 0.9
#: A publication that nobody has asked for during so many median steps, and at least so long, is dropped.
UNUSED_STEPS, UNUSED_S = 20.0, 120.0


@dataclass(slots=True)
class _Publication:
    """The published value of a shard, of one ownership of it; times in monotonic seconds."""

    owned: Owned
    published: Published
    made_at: float
    asked_at: float
    #: The published version that the backup, which may own the shard next, had when it asked last.
    backup_has: int = 0


class Sending(NamedTuple):
    """The frames of arrays to be sent, produced when they are, and their size."""

    buffers: Iterator[Buffer]
    size_bytes: int


def changes_of(shard: int, published: Published, changes: Sequence[Change]) -> Sending:
    """These changes of a published value."""
    frames = (
        encoded_frames(shard, change.payload, change.codec, Part.CHANGE, version=change.version) for change in changes
    )
    sizes = (framed_bytes(change.codec, published.value.size, len(change.payload)) for change in changes)
    return Sending(itertools.chain.from_iterable(frames), sum(sizes))


class _Due(NamedTuple):
    """A version to be made, or the beginning of a publication: where there is no `former` to go on from."""

    shard: int
    owned: Owned
    former: Published | None
    name: bytes
    source: ApproximatedState


@dataclass(eq=False)
class Publisher:
    """The publications of the shards that this node owns. `choose` names the codec of the next change; while that is
    one for whole values nothing is published."""

    store: ShardStore
    replica: Replica
    view: SwarmView
    environment: Environment
    choose: Callable[[], CodecName]

    def __post_init__(self) -> None:
        self._clock = self.environment.clock
        self._executor = self.environment.executor
        self._publications: dict[int, _Publication] = {}
        #: What was published of the shards that were handed over since the last pull: this node follows from there.
        self._left: dict[int, Published] = {}
        self._one_at_a_time = asyncio.Lock()

    def published(self, shard: int) -> Published | None:
        """The published value of a shard that this node owns, if it has one, and if changes are chosen at all."""
        publication = self._publications.get(shard)
        if publication is None or self.store.owned.get(shard) is not publication.owned:
            return None
        return None if CODECS[self.choose()].is_whole else publication.published

    def first_value(self, shard: int, publication: bytes) -> Vector | None:
        """The first published value of a publication, which is never written to; None if the publication has gone on,
        or is another."""
        published = self.published(shard)
        return (
            published.value
            if published is not None and (published.publication, published.version) == (publication, 0)
            else None
        )

    async def publish(self, follower: bytes, asked: Iterable[tuple[int, Position]]) -> None:
        """A node asks for shards, and has these positions: begin the publications that are missing, and make the
        versions due."""
        codec = self.choose()
        if CODECS[codec].is_whole:
            return
        async with self._one_at_a_time:
            now, step_s = self._clock.monotonic(), self.view.median_step_seconds()
            found = (self._due(shard, follower, position, codec, now, step_s) for shard, position in asked)
            due = [one for one in found if one is not None]
            while due:
                part, values = list[_Due](), 0
                while due and values < VALUES_PER_PART:
                    part.append(due.pop(0))
                    values += self.store.size(part[-1].shard)
                await self._make(part, codec, now)

    def _due(
        self, shard: int, follower: bytes, position: Position, codec: CodecName, now: float, step_s: float
    ) -> _Due | None:
        owned = self.store.owned.get(shard)
        if owned is None or owned.moving:
            # While the shard moves the value does not change, and the new owner goes on from this version.
            return None
        source = ApproximatedState(owned.rank_term, owned.state.version)
        publication = self._publications.get(shard)
        if publication is None or publication.owned is not owned:
            return _Due(shard, owned, None, self.environment.entropy.token(PUBLICATION_ID_BYTES), source)
        former = publication.published
        publication.asked_at = now
        if position.publication == former.publication and follower in owned.target_ids():
            publication.backup_has = position.published
        wait_s = STEP_PART * min(1.0, former.last_bytes_per_value / CODECS[codec].bytes_per_value) * step_s
        if position == (former.publication, former.version):
            wait_s /= 2
        is_early = not self.store.synchronous and now - publication.made_at < wait_s
        if is_early or former.source.version == source.version:
            return None
        return _Due(shard, owned, former, former.publication, source)

    async def _make(self, due: list[_Due], codec: CodecName, now: float) -> None:
        """Make these versions, and put each in the place of its former version: both are in memory meanwhile."""
        pauses = ThreadPauses(self._executor)
        made = await self._executor.run(_made, due, codec, pauses)
        for one, published in zip(due, made, strict=True):
            # What was told to a new owner meanwhile is the version before.
            if self.store.owned.get(one.shard) is one.owned and not one.owned.moving:
                self._put(one.shard, one.owned, published, now)

    def _put(self, shard: int, owned: Owned, published: Published, now: float) -> None:
        publication = self._publications.get(shard)
        if publication is not None and publication.owned is owned:
            publication.published, publication.made_at, publication.asked_at = published, now, now
        else:
            self._publications[shard] = _Publication(owned, published, now, now)

    async def begin_run(self, genesis: bytes, shard: int, owned: Owned) -> None:
        """Publish the initial value of a shard that this node has founded, for joiners that have made the same one.
        Dropped like any publication that nobody asks for."""
        if CODECS[self.choose()].is_whole:
            return
        source = ApproximatedState(owned.rank_term, owned.state.version)
        value = owned.state.value
        published = await off_loop(self._executor, value.size, begin_run, genesis, shard, value, source)
        if self.store.owned.get(shard) is owned and shard not in self._publications:
            self._put(shard, owned, published, self._clock.monotonic())

    def drop_unused(self) -> None:
        """Drop the publications that nobody asks for any more, and those of shards that have another owner."""
        if not self._publications:
            return  # as where values are pulled whole
        now, unused_s = self._clock.monotonic(), max(UNUSED_S, UNUSED_STEPS * self.view.median_step_seconds())
        for shard, publication in list(self._publications.items()):
            if self.store.owned.get(shard) is not publication.owned or now - publication.asked_at > unused_s:
                del self._publications[shard]

    # -- hand-over ----------------------------------------------------------------------------------------------

    def heads_for(self, shards: Iterable[int]) -> tuple[list[PublishedHead], Sending]:
        """What a hand-over says of these shards, and its body: the last change of each, and all that the backup, which
        owns them next, may lack."""
        heads, sent = [], list[Sending]()
        for shard in shards:
            published = self.published(shard)
            if published is None:
                heads.append(PublishedHead())
                continue
            # The last change in any case: other followers have not asked for it yet.
            last = max(0, published.version - 1)
            has = min(self._publications[shard].backup_has, last)
            changes = published.since(has) or published.since(last) or ()
            sent.append(changes_of(shard, published, changes))
            (term, version), count = published.source, len(changes)
            heads.append(
                PublishedHead(published.publication, published.version, published.digest, version, term, changes=count)
            )
        return heads, Sending(
            itertools.chain.from_iterable(one.buffers for one in sent), sum(one.size_bytes for one in sent)
        )

    async def read_heads(self, message: HandOver, sender: bytes, reader: FrameReader) -> dict[int, Published]:
        """The publications that go on here if the hand-over is accepted. Raises `BadFrame`."""
        work = list[_Following]()
        for info, head in zip(message.shards, message.published, strict=False):
            if info.shard >= len(self.store):
                break
            changes = []
            for version in range(head.published - head.changes + 1, head.published + 1):
                size = self.store.size(info.shard)
                encoded, codec = await read_encoded(reader, info.shard, Part.CHANGE, size, version=version)
                changes.append(Change(version, codec, encoded))
            backed = self.store.backed.get(info.shard)
            # Promise 7 (docs/faults.md): an absurd version changes nothing.
            is_believed = (
                self.store.ownership.is_plausible(head.rank) and max(head.version, head.published) < MAX_BELIEVED
            )
            if backed is None or backed.owner.node_id != sender or not is_believed:
                continue
            publication, held_version = self.replica.position_of(info.shard)
            lacking = head.published - held_version
            if head.publication and publication == head.publication and 0 <= lacking <= len(changes):
                source = ApproximatedState(head.rank, head.version)
                last = Published(head.publication, head.published, _NO_VALUE, head.digest, source, tuple(changes))
                missing = tuple(changes[len(changes) - lacking :])
                work.append((info.shard, self.replica.slice_of(info.shard), missing, last))
        return await self._executor.run(_continued, work) if work else {}

    def leave(self, shard: int) -> None:
        """Another node goes on with the publication of this shard."""
        if (published := self.published(shard)) is not None:
            self._left[shard] = published
            del self._publications[shard]

    def take_left(self) -> dict[int, Published]:
        """What was published of the shards handed over since the last call, by shard."""
        left, self._left = self._left, {}
        return left

    def go_on(self, shard: int, owned: Owned, published: Published) -> None:
        """This node owns the shard now, and goes on from the value that its followers hold."""
        self._put(shard, owned, published, self._clock.monotonic())

    @property
    def size_bytes(self) -> int:
        """Memory of all published values and their changes."""
        found = (publication.published for publication in self._publications.values())
        return sum(published.value.nbytes + published.change_bytes for published in found)


_NO_VALUE: Vector = np.zeros(0, dtype=np.float32)
#: A shard, what the replica holds of it, the changes that this lacks, and the published value without its value.
_Following = tuple[int, Vector, tuple[Change, ...], Published]


def _continued(work: list[_Following]) -> dict[int, Published]:
    found = ((shard, continued(held, missing, last)) for shard, held, missing, last in work)
    return {shard: published for shard, published in found if published is not None}


def _made(due: list[_Due], codec: CodecName, pauses: ThreadPauses) -> list[Published]:
    made = []
    for one in due:
        value = one.owned.state.value
        if one.former is None:
            made.append(begin(one.name, value, one.source))
        else:
            made.append(next_version(one.former, value, one.source, codec))
        pauses.after(value.size)
    return made
