"""The cached view of the peers (`training.exchange.run_state`).

Counts of the nodes that train, of this node and of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Contact
from p2pnode.training.exchange.directory import shard_key
from p2pnode.training.exchange.peer_score import IGNORED_S, NONSENSE, PeerScore
from p2pnode.training.exchange.run_state import (
    COUNTED_FACTOR,
    FURTHEST_AT_FIRST,
    FURTHEST_FACTOR,
    LASTING_S,
    MAX_MEMBERS,
    PASSABLE_STEPS,
    SMALL_SWARM,
    UNKNOWN_FAILED_S,
    VIEW_TTL_S,
    CountComparison,
    Phase,
    RunState,
    SwarmView,
)
from p2pnode.training.exchange.store.shard_states import ANY_STEPS
from p2pnode.training.exchange.terms import MAX_BELIEVED
from tests.harness.environment.simulated import ListLog


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Crowd:
    """A swarm of so many peers, all workers, that counts how often it is asked for the number."""

    node_id = b"m" * 20

    def __init__(self, peers: int, steps: Sequence[int] = ()) -> None:
        self.peers = dict.fromkeys(range(peers))
        self.asked = self.passes = 0
        self.steps = steps
        #: When each of these was heard last; empty: long ago.
        self.heard: list[float] = []
        self.alive: list[bytes] = []
        self.gone: list[bytes] = []
        self.exact = True

    def members(self) -> list[Any]:
        self.passes += 1
        heard = self.heard or [0.0] * len(self.steps)
        always = {"node_id": b"p" * 20, "is_worker": lambda now: True}
        return [
            SimpleNamespace(step=step, step_seconds=float(step), last_heard=last_heard, **always)
            for step, last_heard in zip(self.steps, heard, strict=True)
        ]

    def is_alive(self, node_id: bytes) -> bool:
        return node_id in self.alive

    def is_gone(self, node_id: bytes) -> bool:
        return node_id in self.gone

    def population(self) -> Any:
        return SimpleNamespace(exact=self.exact)

    def workers(self) -> float:
        self.asked += 1
        return len(self.peers) + 1.0


def view_of(crowd: Crowd, clock: Clock, run: RunState | None = None) -> SwarmView:
    swarm, time = cast(Any, crowd), cast(Any, clock)
    score = PeerScore(crowd.node_id, time, ListLog([], "", time))
    return SwarmView(swarm, time, run or RunState(incarnation=1), score)


@pytest.mark.parametrize(("peers", "counts_at_once"), [(SMALL_SWARM, True), (SMALL_SWARM + 1, False)])
def test_one_change_among_many_waits_until_the_cache_expires(peers: int, counts_at_once: bool) -> None:
    """Among few peers a change of membership counts at once. Among many the peers are counted once per lifetime of the
    cache, however many changes there are in it."""
    clock, crowd = Clock(), Crowd(peers)
    view = view_of(crowd, clock)
    assert view.worker_count() == peers + 1

    crowd.peers.popitem()
    if not counts_at_once:
        crowd.peers["another"] = crowd.peers["one more"] = None  # still many
    for _ in range(10):
        view.invalidate()
        view.worker_count()
    now = len(crowd.peers) + 1
    assert view.worker_count() == (now if counts_at_once else peers + 1)
    assert crowd.asked == (11 if counts_at_once else 1)

    clock.now += 1.01 * VIEW_TTL_S
    assert view.worker_count() == now


def test_the_median_step_includes_the_own_step_once_it_is_invalidated() -> None:
    """A step of this node counts after `invalidate`; until then the cached median is used."""
    clock, crowd, run = Clock(), Crowd(2, steps=[3, 9]), RunState(incarnation=1, step=5)
    view = view_of(crowd, clock, run)
    assert view.median_step() == 5

    run.step = 8
    assert view.median_step() == 5
    view.invalidate()
    assert view.median_step() == 8


def test_the_median_step_may_be_that_of_those_who_have_answered() -> None:
    """A node that has not been heard since does not count, whatever its last step was; what is cached stays."""
    clock, crowd = Clock(), Crowd(3, steps=[5, 5, 23])
    crowd.heard = [10.0, 10.0, 50.0]
    view = view_of(crowd, clock, RunState(incarnation=1, step=4))
    assert view.median_step() == 5
    assert view.median_step_of_those_heard(50.0) == 23
    assert view.median_step_of_those_heard(50.1) == 4
    assert view.median_step() == 5


def test_an_unknown_node_counts_as_gone_only_shortly_after_a_failure() -> None:
    """The failure detector decides about known nodes; an unknown one that did not answer is gone for some seconds."""
    clock, crowd = Clock(), Crowd(0)
    view = view_of(crowd, clock)
    unknown, dead, alive = b"u" * 20, b"d" * 20, b"a" * 20
    crowd.gone, crowd.alive = [dead], [alive]

    for node in (unknown, alive):
        view.score.failed(Contact(node, Address("10.0.0.1", 1)), "refused")
    assert [view.is_gone(node) for node in (unknown, dead, alive, crowd.node_id)] == [True, True, False, False]

    clock.now += 1.01 * UNKNOWN_FAILED_S
    assert [view.is_gone(node) for node in (unknown, dead)] == [False, True]


def test_an_absurd_step_of_a_single_other_node_does_not_count() -> None:
    """A node that was suspended goes on where the other is; a claim of a billion steps takes it nowhere. Of two others
    the median decides, and a node that has not begun believes the other."""
    run = RunState(incarnation=1)

    def median(*steps: int) -> int:
        return view_of(Crowd(len(steps), steps=list(steps)), Clock(), run).median_step()

    assert median(10**9) == 10**9
    run.step, run.has_begun = 3, True
    assert median(12) == 12
    assert median(FURTHEST_AT_FIRST + 3 * FURTHEST_FACTOR) == FURTHEST_AT_FIRST + 3 * FURTHEST_FACTOR
    assert median(10**9) == 3
    assert median(4, 10**9) == 4


def test_no_node_is_believed_to_be_far_beyond_the_median() -> None:
    """One peer that announces a billion steps moves the bound of the others nowhere; before the first step there is
    none."""
    clock = Clock()
    view = view_of(Crowd(3, [100, 120, 1 << 40]), clock)
    assert view.furthest_step() == 1_000_000 + 1000 * 120
    assert view.plausible_steps() == (2 * 1_120_000, 2 * 13_000)
    assert view_of(Crowd(0), clock).furthest_step() == MAX_BELIEVED
    assert view_of(Crowd(0), clock).plausible_steps() == ANY_STEPS


def test_a_peer_that_is_ignored_counts_as_gone_and_its_step_does_not_count() -> None:
    """As if it had left; a minute later it is there again."""
    clock, crowd = Clock(), Crowd(1, [50])
    crowd.alive.append(b"p" * 20)
    view = view_of(crowd, clock)
    for _ in range(NONSENSE):
        view.score.nonsense(b"p" * 20, "value")
        clock.now += 1.0
    assert view.is_gone(b"p" * 20)
    assert view.median_step() == 0
    clock.now += IGNORED_S
    assert not view.is_gone(b"p" * 20)
    assert view.median_step() == 50


@pytest.mark.parametrize("peers", [SMALL_SWARM, SMALL_SWARM + 1])
def test_the_median_step_time_is_asked_for_often_and_computed_once(peers: int) -> None:
    """At every check of the shards and for every bundle: hundreds of peers are passed once per lifetime of the cache,
    and again when one of few has changed."""
    clock, crowd = Clock(), Crowd(peers, steps=[1, 2, 3])
    view = view_of(crowd, clock)
    assert [view.median_step_seconds() for _ in range(5)] == [2.0] * 5
    assert crowd.passes == 1

    crowd.steps = [5, 6, 7]
    view.invalidate()
    assert view.median_step_seconds() == (6.0 if peers == SMALL_SWARM else 2.0)
    clock.now += VIEW_TTL_S + 0.01
    assert view.median_step_seconds() == 6.0
    assert crowd.passes == (3 if peers == SMALL_SWARM else 2)


def test_no_barrier_has_passed_far_beyond_most_others() -> None:
    """One of three others says that it is far ahead, or behind: that moves nothing. This node may be ahead of most."""
    for steps, most in [((40, 41, 10**9), 41), ((10**9, 40), 40), ((40, 41, 0), 40)]:
        view = view_of(Crowd(len(steps), steps), Clock())
        assert view.passable_step() == most + PASSABLE_STEPS
    view = view_of(Crowd(2, (3, 4)), Clock())
    view._run.step = 60
    assert view.passable_step() == 60 + PASSABLE_STEPS


A, B = b"a" * 20, b"b" * 20


@pytest.mark.parametrize(
    ("theirs", "mine", "exact", "expected"),
    [
        (2.0, 6.0, True, 0.5 * 2 / 6),
        (5.0, 6.0, True, 0.5 * 5 / 6),
        (6.0, 2.0, True, 0.5),
        (20.0, 21.0, True, 0.5),
        (30.0, 40.0, False, 0.5),
        (11.0, 40.0, False, 0.5 * 11 / 40),
        (0.0, 6.0, True, 0.5),
    ],
    ids=["hidden", "one is missing", "the owner knows fewer", "about equal", "estimates", "no estimate", "not said"],
)
def test_a_weight_is_corrected_to_the_larger_count(theirs: float, mine: float, exact: bool, expected: float) -> None:
    """Where the counts differ by more than chance, and only down: nobody counts nodes that are not there for long."""
    crowd = Crowd(0)
    crowd.exact, crowd.workers = exact, lambda: mine  # type: ignore[method-assign]
    assert view_of(crowd, Clock()).corrected(0.5, theirs) == pytest.approx(expected)


def test_a_difference_that_lasts_is_named() -> None:
    """From the second count on that says so, in either direction, until one agrees."""
    counts = CountComparison()
    for now in (0.0, LASTING_S / 2):
        counts.note(A, 2.0, 6.0, COUNTED_FACTOR, now)
        counts.note(B, 6.0, 2.0, COUNTED_FACTOR, now)
        assert counts.lasting() == []
    counts.note(A, 2.0, 6.0, COUNTED_FACTOR, LASTING_S)
    assert counts.lasting() == [(A, 2.0)]
    counts.note(B, 6.0, 2.0, COUNTED_FACTOR, LASTING_S)
    assert counts.lasting() == [(A, 2.0), (B, 6.0)]
    counts.note(A, 6.0, 6.0, COUNTED_FACTOR, LASTING_S)
    assert counts.lasting() == [(B, 6.0)]


def test_views_that_differ_for_a_moment_are_no_difference() -> None:
    """Somebody has just come or gone; steps may take minutes; an older version says nothing."""
    counts = CountComparison()
    counts.note(A, 5.0, 6.0, COUNTED_FACTOR, 0.0)
    counts.note(A, 6.0, 6.0, COUNTED_FACTOR, 600.0)
    counts.note(A, 6.0, 7.0, COUNTED_FACTOR, 1200.0)
    for now in (0.0, 100.0):
        counts.note(B, 0.0, 6.0, COUNTED_FACTOR, now)
    assert counts.lasting() == []


def test_the_members_that_are_remembered_are_bounded() -> None:
    """The one that was heard longest ago is forgotten."""
    counts = CountComparison()
    for now in (0.0, LASTING_S):
        for number in range(MAX_MEMBERS + 1):
            counts.note(number.to_bytes(20, "big"), 1.0, 9.0, COUNTED_FACTOR, now)
    assert len(counts.lasting()) <= MAX_MEMBERS


def test_a_phase_includes_the_earlier_ones_and_is_never_left_backwards() -> None:
    """A drained node is closed and leaving too; a late call for an earlier phase changes nothing. Nor is a barrier that
    was passed undone by a pull for an older step."""
    run = RunState(incarnation=1)
    for phase, expected in (
        (Phase.LEAVING, (True, False, False)),
        (Phase.CLOSED, (True, True, False)),
        (Phase.DRAINED, (True, True, True)),
        (Phase.CLOSED, (True, True, True)),
    ):
        run.enter(phase)
        assert (run.is_leaving, run.is_closed, run.is_drained) == expected
    run.pass_barrier(5)
    run.pass_barrier(3)
    assert run.passed_step == 5


def test_the_keys_of_shards_differ_by_swarm_and_shard() -> None:
    """The candidates of one shard are not those of all shards, nor those of another swarm."""
    keys = {shard_key(genesis, shard) for genesis in (b"g" * 16, b"h" * 16) for shard in range(8)}
    assert {len(key) for key in keys} == {20}
    assert len(keys) == 16
