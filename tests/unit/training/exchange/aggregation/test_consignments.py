"""What waits to be handed on: the first answer of a shard counts, and a bundle takes what it has room for."""

from __future__ import annotations

from tests.harness.builders.stores import IDS, contact
from tests.harness.stubs.exchange_context import GENESIS
from training.exchange.aggregation.bundles import MAX_BUNDLE_BYTES, MAX_PUSHES, Carried
from training.exchange.aggregation.consignments import Consignment, Unanswered, Way
from training.exchange.messages import Push, PushResult


def consignment(step: int, shards: list[int], noted: list[PushResult], size: int = 4) -> Consignment:
    items = [Carried(shard, bytes(size), "float32", size // 4) for shard in shards]
    push = Push(GENESIS, IDS["a"], 1, step, 0, 1.0, [])
    return Consignment(push, items, 0, Unanswered(shards, noted.extend))


def test_the_first_answer_of_a_shard_counts() -> None:
    """A later one is not heard, nor one about another shard. With the last answer nobody waits any more."""
    noted: list[PushResult] = []
    one = consignment(1, [0, 1], noted)
    one.answer([PushResult(0, "ok", 5), PushResult(7, "ok", 5)])
    one.answer([PushResult.retry(0, "not_relayed")])
    assert noted == [PushResult(0, "ok", 5)]
    assert not one.unanswered.is_closed

    one.give_up()
    assert noted[1:] == [PushResult.retry(1, "not_relayed")]
    assert one.unanswered.is_closed


def test_two_consignments_of_a_delta_answer_for_their_own_shards() -> None:
    """One that is given up says nothing of what the other has."""
    noted: list[PushResult] = []
    unanswered = Unanswered([0, 1], noted.extend)
    push = Push(GENESIS, IDS["a"], 1, 1, 0, 1.0, [])
    first, second = (Consignment(push, [Carried(shard, b"", "float32", 0)], 0, unanswered) for shard in (0, 1))
    first.give_up()
    assert not unanswered.is_closed
    second.answer([PushResult(1, "ok"), PushResult(0, "ok")])
    assert noted == [PushResult.retry(0, "not_relayed"), PushResult(1, "ok")]
    assert unanswered.is_closed


def test_signs_of_life_are_heard_while_something_is_awaited() -> None:
    """An empty list says that somebody is at work; after the last answer nothing does."""
    heard: list[list[PushResult]] = []
    one = Unanswered([0], heard.append)
    one.sign_of_life()
    one.answer([PushResult(0, "ok")])
    one.sign_of_life()
    assert heard == [[], [PushResult(0, "ok")]]
    assert Unanswered([], heard.append).is_closed


def test_a_bundle_takes_the_oldest_that_it_has_room_for() -> None:
    """Bounded in bytes and number; one larger than the bound goes alone. What nobody waits for is left out."""
    noted: list[PushResult] = []
    way = Way(contact("b"))
    sizes = [MAX_BUNDLE_BYTES // 2, MAX_BUNDLE_BYTES // 2, 4, 2 * MAX_BUNDLE_BYTES, 4]
    way.waiting += [consignment(step, [0], noted, size) for step, size in enumerate(sizes)]
    way.waiting[4].unanswered.close()
    taken = []
    while batch := way.take():
        taken.append([one.push.step for one in batch])
    assert taken == [[0, 1], [2], [3]]

    way.waiting += [consignment(step, [0], noted) for step in range(MAX_PUSHES + 1)]
    assert len(way.take()) == MAX_PUSHES
    way.give_up()
    assert noted == [PushResult.retry(0, "not_relayed")]
