"""The decisions of one node that shares data: who begins what, after which statements."""

from __future__ import annotations

from p2pnode.training.sharing.member import ADMISSION_S, LEAD_WAIT_S, SILENCE_S, DataMember
from p2pnode.training.sharing.messages import ShareData
from p2pnode.training.trainer_link.data_messages import Claim, DataShape, PartitionTrained
from tests.harness.histories.data_histories import play

SHAPE = DataShape("samples", 60, 1)
A, B, C, D = (bytes([number]) * 20 for number in range(1, 5))


def member(node: bytes, shape: DataShape = SHAPE, incarnation: int = 1) -> DataMember:
    return DataMember(node, incarnation, shape, 0.0)


def exchange(asking: DataMember, asked: DataMember, now: float = 0.0) -> None:
    request = asking.request()
    asked.on_message(asking.node_id, request, now)
    asking.on_message(asked.node_id, asked.answer(request), now)


def admitted(*nodes: bytes) -> list[DataMember]:
    """Members that know each other and have begun nothing."""
    members = [member(node) for node in nodes]
    for _ in range(2):
        for asking in members:
            for asked in members:
                if asking is not asked:
                    exchange(asking, asked)
    assert all(one.is_admitted(0.0) for one in members)
    return members


def claim_all(one: DataMember) -> set[int]:
    one.begin(0.0, finished=False, has_claims=False)
    return {claim.partition for claim in one.claim(0, 1000)}


def finish(one: DataMember, partitions: set[int], epoch: int = 0) -> None:
    one.on_trained([PartitionTrained(epoch, partition, 1, True) for partition in sorted(partitions)], -1)


def test_a_joiner_waits_for_every_peer() -> None:
    """A peer that has not answered may have begun anything."""
    joiner, other = member(A), member(B)
    joiner.on_peers([B, C], 0.0)
    exchange(joiner, other)

    assert joiner.missing() == [C]
    assert not joiner.is_admitted(1.0)
    joiner.on_no_data(C)
    assert joiner.is_admitted(1.0)


def test_a_joiner_hears_of_a_member_from_another() -> None:
    """The views in the answers name members that the overlay has not shown; they have to answer too."""
    first, second = admitted(A, B)
    joiner = member(C)
    joiner.on_peers([A], 0.0)
    exchange(joiner, first)

    assert joiner.missing() == [B]
    assert not joiner.is_admitted(0.0)
    exchange(joiner, second)
    assert joiner.is_admitted(0.0)


def test_a_silent_peer_delays_a_joiner_for_a_bounded_time() -> None:
    """After `ADMISSION_S` it goes on, and remembers who was silent."""
    joiner = member(A)
    joiner.on_peers([B], 0.0)

    assert not joiner.is_admitted(ADMISSION_S - 0.1)
    assert joiner.is_admitted(ADMISSION_S)
    assert list(joiner.unanswered) == [B]


def test_a_member_that_nobody_reaches_directly_is_heard_through_others() -> None:
    """Two nodes behind NATs never exchange a message, but know of each other; a third passes their statements on."""
    between = member(B)
    one, other = member(A), member(C)
    one.on_peers([B, C], 0.0)
    other.on_peers([A, B], 0.0)
    for _ in range(3):
        exchange(one, between)
        exchange(other, between)

    assert one.is_admitted(0.0)
    assert other.is_admitted(0.0)
    assert {node for node, _ in one.view()} == {A, B, C}
    parts = [claim_all(each) for each in (one, between, other)]
    assert sorted(partition for part in parts for partition in part) == list(range(60))


def test_a_member_that_leaves_says_how_far_it_has_come() -> None:
    """To the sample: the next one continues within a partition."""
    shape = DataShape("samples", 60_000, 1)
    first, second = member(A, shape), member(B, shape)
    exchange(first, second)
    exchange(second, first)
    second.begin(0.0, finished=False, has_claims=False)
    [claim] = second.claim(0, 1)
    second.on_trained([PartitionTrained(0, claim.partition, 17, False)], -1)

    second.leave()
    exchange(second, first)

    first.begin(0.0, finished=False, has_claims=False)
    assert Claim(0, claim.partition, 17) in first.claim(0, 2000)
    assert first.view() == [(A, 1)]


def test_a_member_wrongly_declared_dead_is_taken_back() -> None:
    """Its own statement shows that it lives, and what it has begun is left to it."""
    first, second = admitted(A, B)
    theirs = claim_all(second)
    first.on_gone(B)
    assert first.view() == [(A, 1)]

    exchange(second, first)

    assert first.view() == [(A, 1), (B, 1)]
    assert claim_all(first) == set(range(60)) - theirs


def test_a_member_unknown_to_the_overlay_is_gone_when_silent() -> None:
    """Nobody would ever declare it dead."""
    first, _ = admitted(A, B)
    first.on_peers([], SILENCE_S - 1)
    assert len(first.view()) == 2
    first.on_peers([], SILENCE_S + 1)
    assert len(first.view()) == 1


def test_a_slow_member_releases_to_those_that_are_ahead() -> None:
    """When another has begun the next epoch, it leaves what it has not begun to it, and never begins it again."""
    fast, slow = admitted(A, B)
    mine = claim_all(fast)
    finish(fast, mine)
    slow.begin(0.0, finished=False, has_claims=False)
    kept = {claim.partition for claim in slow.claim(0, 3)}
    fast.begin(0.0, finished=True, has_claims=False)
    assert fast.claim(0, 1)[0].epoch == 1

    exchange(fast, slow)

    rest = {claim.partition for claim in fast.claim(0, 1000) if claim.epoch == 0}
    assert rest == set(range(60)) - mine - kept
    assert {claim.epoch for claim in slow.claim(0, 1000)} == set()


def test_what_the_heir_of_a_release_leaves_behind_comes_back() -> None:
    """If it dies, and all others have released it too, the first in rank trains it after all."""
    fast, slow = admitted(A, B)
    finish(fast, claim_all(fast))
    fast.begin(0.0, finished=True, has_claims=False)
    fast.claim(0, 1)
    exchange(fast, slow)
    slow.begin(0.0, finished=False, has_claims=False)
    before = [claim for claim in slow.claim(0, 1000) if claim.epoch == 0]

    slow.on_gone(A)

    assert before == []
    assert [claim for claim in slow.claim(0, 1000) if claim.epoch == 0]


def test_a_node_far_ahead_waits_for_releases() -> None:
    """Others may just not have heard how far it is; it waits a bounded time."""
    fast, slow = admitted(A, B)
    finish(fast, claim_all(fast))
    for epoch in (1, 2):
        assert fast.begin(0.0, finished=True, has_claims=False) is (epoch == 1)
        if epoch == 1:
            finish(fast, {claim.partition for claim in fast.claim(0, 1000)}, epoch=1)
    assert fast.begin(LEAD_WAIT_S, finished=True, has_claims=False)

    exchange(slow, fast)
    assert slow.claim(0, 1000) == []


def test_nodes_with_other_data_share_nothing() -> None:
    """Another length or seed is another data set; both are told."""
    one, other = member(A), member(B, DataShape("samples", 61, 1))
    one.on_peers([B], 0.0)
    exchange(one, other)

    assert one.is_admitted(0.0)
    assert one.view() == [(A, 1)]
    assert other.strangers == {A: SHAPE}
    assert claim_all(one) == set(range(60))


def test_more_nodes_than_samples() -> None:
    """A node without a partition of its own gets one that others train too, and it says so."""
    shape = DataShape("samples", 2, 1)
    members = [member(node, shape) for node in (A, B, C, D)]
    for asking in members:
        for asked in members:
            if asking is not asked:
                exchange(asking, asked)

    assert members[0].is_short_of_data()
    copy = members[0].claim_copy()
    assert copy.partition in (0, 1)
    assert not copy.counted


def test_a_message_of_a_node_without_data_is_an_answer() -> None:
    """A peer that shares nothing is not waited for, and is not in the view."""
    one = member(A)
    one.on_peers([B], 0.0)
    one.on_message(B, ShareData([]), 0.0)

    assert one.is_admitted(0.0)


def test_random_histories_train_every_sample_once() -> None:
    """Nodes join, leave, die and return, messages are lost: no sample of an epoch is skipped, and only what a dead node
    trained is trained twice."""
    tallies = [play(seed, seconds=12.0, size=40) for seed in range(16)]

    assert [tally for tally in tallies if tally.twice or tally.skipped] == []
    assert sum(tally.deaths for tally in tallies) > 4
    assert sum(tally.leaves for tally in tallies) > 4
    assert sum(tally.trained for tally in tallies) > 1200


def test_a_restarted_node_is_another_member() -> None:
    """Its new start takes the place of the old, whose unfinished partitions are free again."""
    first, second = admitted(A, B)
    claim_all(second)
    exchange(second, first)
    again = member(B, incarnation=2)
    exchange(again, first)

    assert first.view() == [(A, 1), (B, 2)]
    parts = [claim_all(first), claim_all(again)]
    assert sorted(partition for part in parts for partition in part) == list(range(60))
