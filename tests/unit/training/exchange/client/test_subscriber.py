"""Following a publication: all of an answer or nothing of it is in the replica, and never twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest

from p2pnode.overlay.transport import Buffer
from p2pnode.training.encoding.frames import BadFrame, FrameReader, Part, encoded_frames, frames, new_memory
from p2pnode.training.exchange.client.subscriber import Subscriber
from p2pnode.training.exchange.messages import PullResult
from p2pnode.training.exchange.owner.published import ApproximatedState, Published, begin, next_version
from p2pnode.training.exchange.store.replica import NO_POSITION, Position
from tests.harness.builders.stores import contact, store_of, term
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of, records_of

SHARD, SIZE = 1, 4
RANK = term(1, "a")


def publication(versions: int) -> Published:
    """A publication after so many versions."""
    chance = np.random.default_rng(1)
    x = chance.standard_normal(SIZE).astype(np.float32)
    published = begin(b"c" * 8, x, ApproximatedState(RANK, 10))
    for number in range(versions):
        x = x + chance.standard_normal(SIZE).astype(np.float32)
        published = next_version(published, x, ApproximatedState(RANK, 11 + number), "int8")
    return published


def answer(published: Published, changes: int | None) -> tuple[PullResult, list[bytes]]:
    """The last changes of a publication, or the whole."""
    status: Any = "value" if changes is None else "changes"
    result = PullResult(
        SHARD,
        status,
        RANK,
        published.source.version,
        publication=published.publication,
        published=published.version,
        digest=published.digest,
        changes=changes or 0,
    )
    if changes is None:
        return result, [bytes(one) for one in frames(SHARD, published.value, published.whole_codec, Part.VALUE)]
    body: list[bytes] = []
    for version in range(published.version - changes + 1, published.version + 1):
        change = publication(version).changes[-1]
        sent = encoded_frames(SHARD, change.payload, change.codec, Part.CHANGE, version=change.version)
        body += [bytes(one) for one in sent]
    return result, body


async def stream(buffers: list[bytes]) -> AsyncIterator[Buffer]:
    for buffer in buffers:
        yield buffer


class Following:
    """A follower and its replica."""

    def __init__(self) -> None:
        self.context = context = context_of(ScriptedSwarm(contact("b")), store_of("b"))
        self.follower = Subscriber(
            context.store, context.replica, context.counters, context.rpc.turns, context.environment
        )
        self.replica = self.context.replica

    async def take(self, result: PullResult, body: list[bytes]) -> bool:
        arrays, size = await self.follower.read(FrameReader(stream(body)), result, new_memory)
        assert size == sum(len(part) for part in body[1::2])
        return await self.follower.take(result, arrays)

    def holds(self, published: Published) -> bool:
        is_same = self.replica.slice_of(SHARD).tobytes() == published.value.tobytes()
        is_there = self.replica.position_of(SHARD) == (published.publication, published.version)
        return is_same and is_there and self.replica.version_of(SHARD) == published.source

    @property
    def counts(self) -> tuple[int, int, int]:
        counters = self.context.counters
        return counters.followed, counters.publications_entered, counters.publication_mismatches


async def entered(at: Published) -> Following:
    following = Following()
    assert await following.take(*answer(at, None))
    assert following.holds(at)
    return following


def scenario(story: Any) -> None:
    run(story())


def test_a_follower_enters_with_the_whole_and_goes_on_with_changes() -> None:
    """One change, or two at once; version and rank of the copy are those of the value that was published."""

    async def story() -> None:
        following = await entered(publication(0))
        assert await following.take(*answer(publication(1), 1))
        assert following.holds(publication(1))
        assert await following.take(*answer(publication(3), 2))
        assert following.holds(publication(3))
        assert following.counts == (2, 1, 0)

    scenario(story)


@pytest.mark.parametrize("start", [0, 2])
def test_a_whole_of_any_version_is_taken(start: int) -> None:
    """In bfloat16 at the beginning, in float32 later."""

    async def story() -> None:
        await entered(publication(start))

    scenario(story)


def test_changes_that_do_not_lead_from_what_is_held_change_nothing() -> None:
    """The same answer a second time, one that begins later, one of another publication."""

    async def story() -> None:
        following = await entered(publication(1))
        result, body = answer(publication(2), 1)
        assert await following.take(result, body)
        assert not await following.take(result, body)
        assert following.holds(publication(2))
        assert not await following.take(*answer(publication(4), 1))
        following.replica.set_version(SHARD, RANK, 12, Position(b"d" * 8, 3))
        assert not await following.take(*answer(publication(4), 1))
        assert following.replica.slice_of(SHARD).tobytes() == publication(2).value.tobytes()
        assert following.counts == (1, 1, 0)

    scenario(story)


def test_a_body_that_is_torn_leaves_the_shard_as_it_was() -> None:
    """Of two changes the first has arrived: neither is in."""

    async def story() -> None:
        following = await entered(publication(1))
        result, body = answer(publication(3), 2)
        with pytest.raises(BadFrame, match="is missing"):
            await following.take(result, body[:2])
        with pytest.raises(BadFrame, match="ended inside"):
            await following.take(result, [*body[:3], body[3][:5]])
        assert following.holds(publication(1))
        assert await following.take(result, body)
        assert following.holds(publication(3))

    scenario(story)


def test_a_change_of_another_version_is_no_answer() -> None:
    """Its frame names the version that it leads to."""

    async def story() -> None:
        following = await entered(publication(1))
        result, body = answer(publication(3), 2)
        with pytest.raises(BadFrame, match="expected shard 1 in version 2, got version 3"):
            await following.take(result, [*body[2:], *body[:2]])
        assert following.holds(publication(1))

    scenario(story)


def test_another_digest_is_counted_logged_and_puts_the_shard_in_doubt() -> None:
    """The replica keeps what it has, without a version, and the next pull asks for the whole."""

    async def story() -> None:
        following = await entered(publication(1))
        following.replica.slice_of(SHARD)[2] += 1.0
        held = following.replica.slice_of(SHARD).copy()
        assert not await following.take(*answer(publication(2), 1))
        assert following.replica.slice_of(SHARD).tobytes() == held.tobytes()
        assert following.replica.position_of(SHARD) == NO_POSITION
        assert following.replica.version_of(SHARD) == (RANK, 0)
        assert following.counts == (0, 1, 1)
        assert [one.event for one in records_of(following.context)] == ["publication_mismatch"]
        assert await following.take(*answer(publication(2), None))
        assert following.holds(publication(2))

    scenario(story)


def test_the_same_version_of_another_owner_has_another_digest() -> None:
    """Two owners went on from one version. A follower of the one is told `same` by the other: it asks for the whole."""

    async def story() -> None:
        following = await entered(publication(1))
        result, _ = answer(publication(1), 0)
        same = msgspec.structs.replace(result, status="same")
        assert following.follower.is_same(same)
        assert following.follower.is_same(PullResult(SHARD, "same"))
        assert not following.follower.is_same(msgspec.structs.replace(same, published=2))
        assert following.holds(publication(1))
        assert not following.follower.is_same(msgspec.structs.replace(same, digest=b"another."))
        assert following.replica.position_of(SHARD) == NO_POSITION
        assert following.replica.version_of(SHARD) == (RANK, 0)
        assert following.counts == (0, 1, 1)

    scenario(story)


def test_a_whole_with_another_digest_is_not_taken() -> None:
    """What the replica has stays; it is asked for again."""

    async def story() -> None:
        following = await entered(publication(1))
        result, body = answer(publication(2), None)
        body[1] = bytes([body[1][0] ^ 1]) + body[1][1:]
        assert not await following.take(result, body)
        assert following.holds(publication(1))
        assert following.counts == (0, 1, 1)

    scenario(story)


def test_a_shard_that_is_copied_in_turns_has_no_version_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline in between leaves it without one: the next pull brings the whole."""
    monkeypatch.setattr("p2pnode.training.cooperative.VALUES_PER_TURN", 1)
    monkeypatch.setattr("p2pnode.training.exchange.client.subscriber.VALUES_PER_COPY", 1)

    async def story() -> None:
        following = await entered(publication(1))
        result, body = answer(publication(2), 1)
        task = asyncio.create_task(following.take(result, body))
        while following.replica.slice_of(SHARD).tobytes() == publication(1).value.tobytes():  # noqa: ASYNC110 - a value sets no event
            await asyncio.sleep(0)
        assert following.replica.slice_of(SHARD).tobytes() != publication(2).value.tobytes()
        assert following.replica.position_of(SHARD) == NO_POSITION
        assert following.replica.version_of(SHARD) == (RANK, 0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert following.replica.position_of(SHARD) == NO_POSITION
        assert not await following.take(result, body)
        assert await following.take(*answer(publication(2), None))
        assert following.holds(publication(2))

    scenario(story)


def test_an_answer_that_was_overtaken_while_it_was_computed_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of another node arrived meanwhile."""
    monkeypatch.setattr("p2pnode.training.cooperative.VALUES_PER_TURN", 0)

    async def story() -> None:
        following = await entered(publication(1))

        async def computed_early(function: Any, *args: Any) -> Any:
            result = function(*args)
            await asyncio.sleep(1.0)
            return result

        monkeypatch.setattr(following.context.environment.executor, "run", computed_early)
        task = asyncio.create_task(following.take(*answer(publication(2), 1)))
        await asyncio.sleep(0.5)
        with following.replica.writing(SHARD) as values:
            values[:] = 7.0
            following.replica.set_version(SHARD, RANK, 0)
        assert not await task
        assert following.replica.slice_of(SHARD).tolist() == [7.0] * SIZE
        assert following.counts == (0, 1, 0)

    scenario(story)


def test_a_shard_has_no_stamp_while_a_change_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that reads it meanwhile notices; before and after it has the version of the published value."""
    monkeypatch.setattr("p2pnode.training.cooperative.VALUES_PER_TURN", 1)
    monkeypatch.setattr("p2pnode.training.exchange.client.subscriber.VALUES_PER_COPY", 1)

    async def story() -> None:
        following = await entered(publication(1))
        stamps = [following.replica.stamp(SHARD)]
        task = asyncio.create_task(following.take(*answer(publication(2), 1)))
        while not task.done():
            stamps.append(following.replica.stamp(SHARD))
            await asyncio.sleep(0)
        stamps.append(following.replica.stamp(SHARD))
        first, *between, last = list(dict.fromkeys(stamps))
        assert between == [None]
        assert first is not None
        assert last is not None
        assert (first.writes + 1, last.version) == (last.writes, following.replica.version_of(SHARD))

    scenario(story)


def test_negative_zeros_are_followed_too() -> None:
    """They are bits like all others."""

    async def story() -> None:
        published = begin(b"c" * 8, np.array([-0.0, 0.0, 1.0, -1.0], np.float32), ApproximatedState(RANK, 1))
        assert np.signbit(published.value[0])
        await entered(published)

    scenario(story)
