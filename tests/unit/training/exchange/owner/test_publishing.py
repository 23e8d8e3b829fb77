"""When an owner begins a publication, when it makes a version, and when it drops one."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgspec
import pytest

from p2pnode.training.encoding.frames import FrameReader
from p2pnode.training.encoding.table import CodecName
from p2pnode.training.exchange.owner import publishing
from p2pnode.training.exchange.owner.published import Change, Published
from p2pnode.training.exchange.owner.publishing import (
    BYTES_PER_STEP,
    UNUSED_S,
    Publisher,
)
from p2pnode.training.exchange.ownership_messages import HandOver, PublishedHead
from p2pnode.training.exchange.store.replica import NO_POSITION, Position
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import OwnerInfo
from p2pnode.training.settings import ExchangeSettings
from tests.harness.builders.stores import IDS, backup_of, contact, delta, owner_of, term, zeros
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of
from tests.harness.stubs.exchange_services import publisher_of
from tests.harness.swarms.exchange_overlay import chunks

#: As the other workers announce it.
STEP_S = 10.0
ASKER = contact("x").node_id
#: Four values in int8 are eight bytes: more than `BYTES_PER_STEP`, so a step.
PATIENCE_S = STEP_S


def publishing_owner(*, synchronous: bool = False, codec: CodecName = "int8") -> tuple[Publisher, ShardStore, Any]:
    store = owner_of("a")
    swarm = ScriptedSwarm(contact("a"), [contact("x")])
    for peer in swarm.peers.values():
        peer.step_seconds = STEP_S
    settings = ExchangeSettings(pull_codec="int8", weight="sum", outer_lr=1.0, outer_momentum=0.0)
    context = context_of(swarm, store, synchronous=synchronous, settings=settings)
    return publisher_of(context, lambda: codec), store, context


def position(publisher: Publisher) -> Position:
    published = publisher.published(0)
    assert published is not None
    return Position(published.publication, published.version)


def test_a_publication_begins_when_somebody_asks_and_has_a_version_when_something_was_added() -> None:
    """Not before, and not for what is known."""

    async def scenario() -> None:
        publisher, store, _ = publishing_owner()
        assert publisher.published(0) is None
        await publisher.publish(ASKER, [(0, NO_POSITION), (99, NO_POSITION)])
        first = publisher.published(0)
        assert first is not None
        assert (first.version, first.source.version) == (0, 0)
        await publisher.publish(ASKER, [(0, position(publisher))])
        assert publisher.published(0) is first

        store.add(0, delta(1))
        await publisher.publish(ASKER, [(0, position(publisher))])
        second = publisher.published(0)
        assert second is not None
        assert (second.publication, second.version, second.source) == (first.publication, 1, (term(1, "a"), 1))
        assert [change.codec for change in second.changes] == ["int8"]
        assert abs(float(second.value[0]) - 1.0) < 0.01

    run(scenario())


def test_the_thread_that_makes_changes_pauses_between_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop may share its core."""
    monkeypatch.setattr("p2pnode.training.cooperative.VALUES_PER_TURN", 4)

    async def scenario() -> None:
        publisher, store, context = publishing_owner()
        pauses: list[None] = []
        monkeypatch.setattr(context.environment.executor, "pause", lambda: pauses.append(None))
        await publisher.publish(ASKER, [(shard, NO_POSITION) for shard in store.owned])
        assert len(pauses) == len(store.owned) > 0

    run(scenario())


def test_versions_are_as_far_apart_as_the_followers_can_bear() -> None:
    """A median step for a change of a byte per value; half of it for a follower that has the present version."""
    assert BYTES_PER_STEP < 8 / 4

    async def scenario() -> None:
        publisher, store, _ = publishing_owner()
        await publisher.publish(ASKER, [(0, NO_POSITION)])
        store.add(0, delta(1))
        await publisher.publish(ASKER, [(0, NO_POSITION)])
        versions = []
        for wait_s, is_current in [(0.4, True), (0.2, True), (0.6, False), (0.3, False), (0.2, False)]:
            store.add(0, delta(10 + len(versions)))
            await asyncio.sleep(wait_s * PATIENCE_S)
            await publisher.publish(ASKER, [(0, position(publisher) if is_current else NO_POSITION)])
            versions.append(position(publisher).published)
        assert versions == [1, 2, 2, 2, 3]

    run(scenario())


def test_small_changes_come_more_often() -> None:
    """After one of 0.25 bytes per value the next may come after 0.25/0.6 of a step."""

    async def scenario() -> None:
        publisher, store, _ = publishing_owner()
        await publisher.publish(ASKER, [(0, NO_POSITION)])
        publication = publisher._publications[0]
        publication.published = dataclasses.replace(publication.published, changes=(Change(1, "int8", b"x"),))
        store.add(0, delta(1))
        for wait_s, versions in [(0.4, 0), (0.05, 1)]:
            await asyncio.sleep(wait_s * STEP_S)
            await publisher.publish(ASKER, [(0, NO_POSITION)])
            assert position(publisher).published == versions

    run(scenario())


def test_under_bsp_every_barrier_is_a_tick() -> None:
    """The puller has passed the barrier, and must see its step."""

    async def scenario() -> None:
        publisher, store, _ = publishing_owner(synchronous=True)
        await publisher.publish(ASKER, [(0, NO_POSITION)])
        for version in range(1, 6):
            store.add(0, delta(version))
            await publisher.publish(ASKER, [(0, NO_POSITION)])
            assert position(publisher).published == version

    run(scenario())


def test_a_shard_that_moves_keeps_its_published_version() -> None:
    """The new owner is told that one."""

    async def scenario() -> None:
        publisher, store, _ = publishing_owner()
        await publisher.publish(ASKER, [(0, NO_POSITION)])
        store.add(0, delta(1))
        store.owned[0].moving = True
        await publisher.publish(ASKER, [(0, NO_POSITION)])
        assert position(publisher).published == 0
        store.owned[0].moving = False
        await publisher.publish(ASKER, [(0, NO_POSITION)])
        assert position(publisher).published == 1

    run(scenario())


def test_another_ownership_of_the_shard_has_another_publication() -> None:
    """What was published before it was lost is not: the state may be another one."""

    async def scenario() -> None:
        publisher, store, context = publishing_owner()
        await publisher.publish(ASKER, [(0, NO_POSITION)])
        before = position(publisher)
        state = store.owned[0].state
        store.step_down(0)
        assert publisher.published(0) is None
        store.own(0, state, term(5, "a"), context.rpc.me, 0.0, by_handover=False)
        assert publisher.published(0) is None
        await publisher.publish(ASKER, [(0, NO_POSITION)])
        assert position(publisher).publication != before.publication

    run(scenario())


def test_a_shard_that_is_lost_during_a_tick_is_not_published() -> None:
    """The version is made beside the loop; nobody is sent its result."""

    async def scenario() -> None:
        publisher, store, context = publishing_owner()
        context.environment.executor.delay_s = 1.0
        task = asyncio.create_task(publisher.publish(ASKER, [(0, NO_POSITION)]))
        await asyncio.sleep(0.5)
        store.step_down(0)
        await task
        assert publisher.size_bytes == 0

    run(scenario())


def test_two_who_ask_at_once_are_sent_one_version() -> None:
    """The second waits for the version of the first, although more was added since."""

    async def scenario() -> None:
        publisher, store, context = publishing_owner()
        await publisher.publish(ASKER, [(0, NO_POSITION)])
        store.add(0, delta(1))
        context.environment.executor.delay_s = 1.0
        first = asyncio.create_task(publisher.publish(ASKER, [(0, position(publisher))]))
        await asyncio.sleep(0.5)
        store.add(0, delta(2))
        second = asyncio.create_task(publisher.publish(IDS["b"], [(0, position(publisher))]))
        await first
        sent = publisher.published(0)
        await second
        assert publisher.published(0) is sent
        assert position(publisher).published == 1

    run(scenario())


def test_a_publication_that_is_not_asked_for_is_dropped_and_its_memory_was_counted() -> None:
    """Twenty steps, here, after the last question; a question keeps it."""

    async def scenario() -> None:
        publisher, store, _ = publishing_owner()
        await publisher.publish(ASKER, [(0, NO_POSITION)])
        store.add(0, delta(1))
        await publisher.publish(ASKER, [(0, NO_POSITION)])
        assert publisher.size_bytes == 4 * 4 + 8
        await asyncio.sleep(0.8 * max(UNUSED_S, 20 * STEP_S))
        await publisher.publish(ASKER, [(0, NO_POSITION)])
        await asyncio.sleep(0.8 * max(UNUSED_S, 20 * STEP_S))
        publisher.drop_unused()
        assert publisher.size_bytes > 0
        await asyncio.sleep(0.3 * max(UNUSED_S, 20 * STEP_S))
        publisher.drop_unused()
        assert publisher.size_bytes == 0

    run(scenario())


async def published_by_a(versions: int) -> tuple[Publisher, ShardStore]:
    """Owner a of shard 0, which b backs up, and a publication of so many versions."""
    publisher, store, _ = publishing_owner(synchronous=True)
    store.owned[0].backup = contact("b")
    await publisher.publish(contact("b").node_id, [(0, NO_POSITION)])
    for version in range(1, versions + 1):
        store.add(0, delta(version))
        await publisher.publish(ASKER, [(0, NO_POSITION)])
    return publisher, store


def backup_b(position: Position, value: Any) -> tuple[Publisher, ShardStore]:
    store = backup_of("b", "a")
    context = context_of(ScriptedSwarm(contact("b")), store, settings=ExchangeSettings(pull_codec="int8"))
    context.replica.slice_of(0)[:] = value
    context.replica.set_version(0, term(1, "a"), 1, position)
    return publisher_of(context), store


async def handed_over(to: Publisher, heads: list[PublishedHead], body: Any) -> dict[int, Published]:
    info = OwnerInfo.of(0, term(2, "a"), contact("b"))
    return await to.read_heads(HandOver([info], [1], published=heads), IDS["a"], FrameReader(chunks(list(body))))


@pytest.mark.parametrize("behind", [0, 1])
def test_a_new_owner_goes_on_from_what_its_replica_holds(behind: int) -> None:
    """It has the published value, or lacks the last change, which comes with the hand-over."""

    async def scenario() -> None:
        former, _ = await published_by_a(2 - behind)
        before = former.published(0)
        assert before is not None
        former_store = former.store
        follower = backup_b(position(former), before.value)
        if behind:
            await former.publish(IDS["b"], [(0, position(former))])
            former_store.add(0, delta(9))
            await former.publish(IDS["b"], [(0, position(former))])
        last = former.published(0)
        assert last is not None
        assert last.version == 2

        heads, (body, size) = former.heads_for([0])
        sent = list(body)
        assert [head.changes for head in heads] == [1]
        assert size == sum(len(part) for part in sent)
        found = await handed_over(follower[0], heads, sent)
        assert found[0].value.tobytes() == last.value.tobytes()
        assert (found[0].publication, found[0].version, found[0].source) == (last.publication, 2, last.source)

        publisher, store = follower
        owned = store.own(0, store.backed[0].state, term(3, "b"), contact("b"), 0.0, by_handover=True)  # type: ignore[arg-type]
        publisher.go_on(0, owned, found[0])
        assert position(publisher) == position(former)
        continued = publisher.published(0)
        assert continued is not None
        assert [change.version for change in continued.since(1) or ()] == [2]

    run(scenario())


def test_a_new_owner_that_has_not_followed_begins_a_publication() -> None:
    """Another publication, another value, too far behind, not the shard's owner: nothing goes on."""

    async def scenario() -> None:
        former, _ = await published_by_a(2)
        last = former.published(0)
        assert last is not None
        heads, (body, _) = former.heads_for([0])
        sent = list(body)
        assert [head.changes for head in heads] == [1]
        for place, value in [
            (Position(b"another.", last.version), last.value),
            (Position(last.publication, last.version), last.value + 1),
            (Position(last.publication, last.version + 1), last.value),
            (NO_POSITION, last.value),
        ]:
            follower, _ = backup_b(place, value)
            assert await handed_over(follower, [msgspec.structs.replace(heads[0], changes=0)], []) == {}
        follower, store = backup_b(position(former), last.value)
        del store.backed[0]
        assert await handed_over(follower, heads, sent) == {}
        follower, _ = backup_b(position(former), last.value)
        assert await handed_over(follower, [], []) == {}
        assert await handed_over(follower, [PublishedHead()], []) == {}

    run(scenario())


def test_while_whole_values_are_chosen_nothing_is_published() -> None:
    """A publication from before rests; what is chosen is asked at every pull."""

    async def scenario() -> None:
        publisher, store, context = publishing_owner()
        chosen: list[CodecName] = ["int8"]
        publisher = publisher_of(context, lambda: chosen[0])
        await publisher.publish(ASKER, [(0, NO_POSITION)])
        assert publisher.published(0) is not None
        chosen[0] = "bfloat16"
        store.add(0, delta(1))
        await publisher.publish(ASKER, [(0, NO_POSITION)])
        assert publisher.published(0) is None
        chosen[0] = "int4"
        await publisher.publish(ASKER, [(0, NO_POSITION)])
        published = publisher.published(0)
        assert published is not None
        assert [change.codec for change in published.changes] == ["int4"]

    run(scenario())


def test_values_are_published_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two shards with two values to a part, the first is published before the second is computed: never more than a
    part of the vector is in memory twice."""
    monkeypatch.setattr("p2pnode.training.exchange.owner.publishing.VALUES_PER_PART", 2)

    async def scenario() -> None:
        store = owner_of("a")
        store.own(1, zeros(store, 1), term(1, "a"), contact("a"), 0.0, by_handover=False)
        context = context_of(ScriptedSwarm(contact("a"), [contact("x")]), store)
        publisher = publisher_of(context, lambda: "int8")
        held: list[int] = []
        made = publishing._made

        def noted(due: list[Any], *args: Any) -> Any:
            assert len(due) == 1
            held.append(publisher.size_bytes)
            return made(due, *args)

        monkeypatch.setattr(publishing, "_made", noted)
        await publisher.publish(ASKER, [(0, NO_POSITION), (1, NO_POSITION)])
        assert held == [0, 16]
        assert publisher.size_bytes == 32

    run(scenario())


def test_what_is_computed_while_the_shard_begins_to_move_is_not_published() -> None:
    """The new owner was told the version before."""

    async def scenario() -> None:
        publisher, store, context = publishing_owner()
        await publisher.publish(ASKER, [(0, NO_POSITION)])
        store.add(0, delta(1))
        context.environment.executor.delay_s = 1.0
        task = asyncio.create_task(publisher.publish(ASKER, [(0, NO_POSITION)]))
        await asyncio.sleep(0.5)
        store.owned[0].moving = True
        await task
        assert position(publisher).published == 0

    run(scenario())
