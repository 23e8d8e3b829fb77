"""The failure detector, message by message and state by state: actions are compared as values."""

from __future__ import annotations

import itertools
import random

import pytest

from p2pnode.overlay.kademlia.messages import Gossip, MemberState
from p2pnode.overlay.membership.actions import Action, Broadcast, SendNow, SendPing, SendPingRequest, StateChanged
from p2pnode.overlay.membership.failure_detector import (
    GOSSIP_PAUSE_S,
    LAG_S,
    MAX_PASSED,
    MAX_SCORE,
    MAX_SUSPECTS_PER_ROUND,
    FailureDetector,
    LocalHealth,
)
from p2pnode.overlay.settings import LivenessSettings
from tests.harness.builders.peers import ids

OWN, A, B, C, D = (bytes([number]) * 20 for number in (0, 1, 2, 3, 4))


def detector(*members: bytes, now: float = 0.0) -> FailureDetector:
    made = FailureDetector(OWN, 3, LivenessSettings(), random.Random(1), now)
    for member in members:
        assert made.on_response(member, 1, now) == []
    return made


def news(kind: MemberState, node_id: bytes, incarnation: int = 1) -> Gossip:
    return Gossip(kind, node_id, incarnation)


def run(made: FailureDetector, until: float) -> list[tuple[float, Action]]:
    """Tick at every deadline."""
    seen: list[tuple[float, Action]] = []
    while (due := made.next_deadline()) <= until:
        seen += [(due, action) for action in made.tick(due)]
    return seen


def test_every_member_is_probed_within_one_pass() -> None:
    """Round-robin: four silent members, one probe a second, each exactly once per pass."""
    made = detector(A, B, C, D, now=-10.0)
    probes = [action.node_id for _, action in run(made, 7.99 - 2) if isinstance(action, SendPing)]

    assert sorted(probes[:4]) == [A, B, C, D]


def test_watched_members_are_probed_in_every_round() -> None:
    """Watched members every second, until one of their messages arrives."""
    made = detector(A, B, C, D)
    made.watch([C])
    rounds = [due for due, action in run(made, 10.0) if action == SendPing(C)]

    assert len(rounds) >= 9
    assert max(b - a for a, b in itertools.pairwise(rounds)) <= 1.001


def test_a_member_that_just_sent_something_is_not_probed() -> None:
    """A message within half the interval replaces the probe."""
    made = detector(A)
    made.watch([A])
    due = made.next_deadline()
    made.on_heartbeat(A, 1, due - 0.4)

    assert made.tick(due) == []


def test_time_outs_lead_through_indirect_probes_to_suspicion_and_death() -> None:
    """Direct ping, indirect ping, suspicion (sent to the suspect), death after suspicion_s (broadcast at once)."""
    made = detector(A, B, C)
    through = made.on_timeout(A, 10.0, others=[A, B, C])
    assert len(through) == 1
    assert isinstance(through[0], SendPingRequest)
    assert (through[0].node_id, sorted(through[0].via)) == (A, [B, C])

    suspected = news(MemberState.SUSPECT, A)
    assert made.on_unreachable(A, 10.5, "silent") == [
        StateChanged(A, "suspect", "silent"),
        SendNow(A, suspected),
        Broadcast(suspected),
    ]
    assert made.is_suspect(A)
    assert made.is_alive(A)
    made._planned = 10.6
    assert SendPing(A) in made.tick(10.6)
    assert [made.on_timeout(A, 10.9, others=[B, C]) for _ in range(3)] == [[], [], []]
    made._planned = 13.5
    actions = made.tick(13.5)
    assert Broadcast(news(MemberState.DEAD, A), at_once=True) in actions
    assert [a.kind for a in actions if isinstance(a, StateChanged)] == ["dead"]
    assert not made.is_alive(A)
    assert made.dead() == [A]


def test_without_helpers_a_time_out_is_a_suspicion_at_once() -> None:
    """In a swarm of two no other node can ping it."""
    made = detector(A)

    assert isinstance(made.on_timeout(A, 1.0, others=[])[0], StateChanged)


def test_no_member_is_removed_before_it_left_our_own_probes_unanswered() -> None:
    """A suspicion is extended until three probes were left unanswered; the third ends it."""
    made = detector(A, B, now=2.0)
    made.on_timeout(A, 2.5, others=[B])
    made.on_unreachable(A, 3.0, "silent")
    made.on_timeout(A, 4.0, others=[B])
    made.on_timeout(A, 5.0, others=[B])
    actions = [action for _, action in run(made, 6.5)]
    assert not [action for action in actions if isinstance(action, StateChanged)], (
        "time-outs before the suspicion do not count"
    )
    assert made.is_suspect(A)

    assert made.on_timeout(A, 6.5, others=[B]) == []
    assert [action.kind for _, action in run(made, 6.8) if isinstance(action, StateChanged)] == ["dead"]


def deaths(seen: list[tuple[float, Action]]) -> dict[bytes, float]:
    """When each was declared dead."""
    return {action.node_id: due for due, action in seen if isinstance(action, StateChanged) and action.kind == "dead"}


def probes(seen: list[tuple[float, Action]]) -> list[tuple[float, bytes]]:
    return [(due, action.node_id) for due, action in seen if isinstance(action, SendPing)]


def run_unanswered(made: FailureDetector, until: float, answering: bytes = b"") -> list[tuple[float, Action]]:
    """Tick at every deadline; no ping is answered, except by this one."""
    seen: list[tuple[float, Action]] = []
    while (due := made.next_deadline()) <= until:
        actions: list[Action] = list(made.tick(due))
        for _, node_id in probes([(due, action) for action in actions]):
            if node_id == answering:
                actions += made.on_heartbeat(node_id, 1, due + 0.01)
            else:
                actions += made.on_timeout(node_id, due + 0.2, others=[])
        seen += [(due, action) for action in actions]
    return seen


def test_many_suspects_take_turns_and_none_dies_before_it_left_three_probes_unanswered() -> None:
    """Two hundred at once: sixteen are probed in a round, those not probed yet first. After twice the time of a
    suspicion each is probed out of turn until it answers, or has left three unanswered. (It was: at that moment all
    were dead, a living one too whose one answer was lost.)"""
    nodes = ids(200)
    made = detector(*nodes, now=1.9)
    for node_id in nodes:
        made.on_unreachable(node_id, 2.0, "silent")
    seen = run_unanswered(made, 11.0, answering=nodes[150])

    asked = [node_id for due, node_id in probes(seen) if 2.0 < due < 5.0]
    assert len(asked) <= 3 * 18
    assert set(asked) >= set(nodes[:32])
    unasked = [node_id for due, node_id in probes(seen) if due < 8.0].count(nodes[150])
    assert unasked == 0, "its turn has not come"
    assert [due for due, node_id in probes(seen) if node_id == nodes[150] and due < 9.0] == [pytest.approx(8.0)]
    found = deaths(seen)
    assert set(found) == {*nodes} - {nodes[150]}
    assert max(found.values()) <= 2.0 + 6.0 + 3 * 0.5 + 0.25
    for node_id, died in found.items():
        assert sum(each == node_id and due < died for due, each in probes(seen)) >= 3


def test_a_suspect_is_not_probed_out_of_turn_while_its_last_probe_waits_for_an_answer() -> None:
    """The pause is the longest wait of a call: half a second, and more while this node lags."""
    made = detector(A, B, now=1.0)
    made.on_unreachable(A, 2.0, "silent")
    made._next_round = 100.0
    seen = run(made, 9.6)
    assert [due for due, _ in probes(seen)] == [pytest.approx(8.0 + 0.5 * each) for each in range(4)]
    made.health.score = 2  # a punctual tick lowers it by one
    made._planned = 10.5
    assert probes([(10.0, action) for action in made.tick(10.0)]) == [], "the last was half a second ago"
    made.health.score = 2  # a punctual tick lowers it by one
    made._planned = 10.5
    assert SendPing(A) in made.tick(10.5)


def test_a_reported_death_of_a_silent_suspect_is_accepted_at_once() -> None:
    """Three probes were left unanswered already: no further probe is sent."""
    made = detector(A, B)
    made.on_unreachable(A, 5.0, "silent")
    for at in (6.0, 7.0, 7.1):
        made.on_timeout(A, at, others=[B])

    actions = made.on_gossip(news(MemberState.DEAD, A), B, 7.2)
    assert [action.kind for action in actions if isinstance(action, StateChanged)] == ["dead"]


def test_a_lagging_loop_extends_deadlines_and_time_outs() -> None:
    """A tick 5 s late moves every deadline by 5 s and stretches time-outs; in-time ticks shrink them again."""
    made = detector(A)
    made.on_unreachable(A, 0.5, "silent")
    made._members[A].missed = 3
    due = made.next_deadline()
    made.tick(due + 5.0)

    assert made.is_alive(A), "3 s of suspicion had passed, but the loop lagged"
    assert made.stretch == 2.0
    made.tick(made.next_deadline())
    assert made.stretch == 1.0
    deaths = [due for due, action in run(made, 20.0) if isinstance(action, StateChanged)]
    assert deaths == [pytest.approx(0.5 + 3.0 + 5.0)]


def test_a_requested_probe_is_sent_at_once_and_not_repeated() -> None:
    """A second request within 0.2 s adds nothing, nor does one for an unknown node."""
    made = detector(A)

    assert made.request_probe(A, 1.0) == [SendPing(A)]
    assert made.request_probe(A, 1.1) == []
    assert made.request_probe(B, 1.1) == []


def test_a_member_that_leaves_is_removed_and_not_called_again() -> None:
    """By its heartbeat or by its gossip; it is not among the dead."""
    made = detector(A, B)

    assert [a.kind for a in made.on_leave(A, 1.0) if isinstance(a, StateChanged)] == ["left"]
    assert made.on_gossip(news(MemberState.LEFT, B), B, 9.0)[0] == StateChanged(B, "left", "it left")
    assert made.dead() == []


def test_with_many_suspects_no_others_are_asked_to_ping_one_more() -> None:
    """Half a swarm that died is not pinged through the other half; the suspicion is the same as after those."""
    many = [bytes([100 + number]) * 20 for number in range(MAX_SUSPECTS_PER_ROUND)]
    made = detector(A, B, *many)
    for each in many[:-1]:
        made.on_unreachable(each, 1.0, "silent")
    assert [type(action) for action in made.on_timeout(A, 2.0, others=[A, B])] == [SendPingRequest]
    made.on_unreachable(many[-1], 2.0, "silent")
    suspected = news(MemberState.SUSPECT, A)
    found = made.on_timeout(A, 3.0, others=[A, B])
    assert found == [
        StateChanged(A, "suspect", "it does not answer, as many others do not"),
        SendNow(A, suspected),
        Broadcast(suspected),
    ]


def test_each_of_hundreds_of_suspects_dies_at_its_own_deadline() -> None:
    """One thousandth of a second apart, in the order in which they were suspected."""
    everybody = [number.to_bytes(20, "big") for number in range(1000, 1400)]
    made = detector(*everybody)
    made.tick(made.next_deadline())
    for number, each in enumerate(everybody):
        made.on_unreachable(each, 1.0 + 0.001 * number, "silent")
        made._members[each].missed = 3
    deaths = [
        (due, action.node_id)
        for due, action in run(made, 4.9)
        if isinstance(action, StateChanged) and action.kind == "dead"
    ]

    assert deaths == [(pytest.approx(4.0 + 0.001 * number), each) for number, each in enumerate(everybody)]


def test_late_ticks_stretch_time_outs_and_punctual_ones_shrink_them() -> None:
    """The score rises and falls by one, and never below zero."""
    health = LocalHealth()
    lagged = [health.on_tick(lag_s) for lag_s in (0.0, 2 * LAG_S, 2 * LAG_S, LAG_S)]

    assert lagged == [False, True, True, False]
    assert (health.score, health.stretch) == (1, 2.0)
    health.on_tick(0.0)
    health.on_tick(0.0)
    assert (health.score, health.stretch) == (0, 1.0)


def test_the_score_is_bounded() -> None:
    """However often the node is suspected, its time-outs are at most eight times as long."""
    health = LocalHealth()
    for _ in range(20):
        health.worsen()

    assert health.score == MAX_SCORE


def test_gossip_is_a_reason_to_probe_and_no_evidence() -> None:
    """A suspicion is passed on, and asked about once in a while. A death, or a leave that others report, is asked about
    and not passed on. What the member sent a moment ago, or an older start, is no reason."""
    for kind in (MemberState.SUSPECT, MemberState.DEAD, MemberState.LEFT):
        made, heard = detector(A, B), news(kind, A)
        made.on_heartbeat(A, 2, 4.5)
        assert made.on_gossip(news(kind, A, 2), B, 5.0) == []
        assert made.on_gossip(heard, B, 9.0) == []
        heard = news(kind, A, 2)
        spread = [Broadcast(heard)] if kind is MemberState.SUSPECT else []
        assert made.on_gossip(heard, B, 9.0) == [SendPing(A), *spread]
        assert made.on_gossip(heard, C, 9.5) == []
        assert made.is_alive(A)
        assert not made.is_suspect(A)
        made.on_heartbeat(A, 2, 9.6)
        again = made.on_gossip(heard, C, 9.0 + GOSSIP_PAUSE_S)
        assert again == [SendPing(A), *spread]


def test_a_reported_death_is_confirmed_by_our_own_probes() -> None:
    """Asked at once, three times; a second report adds nothing. Silence removes it, an answer ends the suspicion."""
    dead, reason = news(MemberState.DEAD, A), "others report it dead, and it does not answer this node"
    silent, answering = detector(A, B, C), detector(A, B, C)
    for made in (silent, answering):
        assert made.on_gossip(dead, B, 5.0) == [SendPing(A)]
        assert made.on_timeout(A, 5.2, others=[B, C]) == [
            StateChanged(A, "suspect", "others report it dead"),
            SendPing(A),
        ]
        assert made.on_gossip(dead, C, 5.3) == []
        assert made.on_timeout(A, 5.4, others=[B, C]) == [SendPing(A)]

    assert silent.on_timeout(A, 5.6, others=[B, C]) == [StateChanged(A, "dead", reason), Broadcast(dead)]
    assert not silent.is_alive(A)
    assert answering.on_heartbeat(A, 1, 5.6) == [StateChanged(A, "refuted", "it sent a message")]
    assert not answering.is_suspect(A)
    later = answering.on_timeout(A, 9.0, others=[B, C])
    assert [type(action) for action in later] == [SendPingRequest], "a later time-out begins anew"


def test_a_node_that_is_suspected_pings_who_said_so() -> None:
    """Any message of its own ends the suspicion there. Gossip about a former start is none about this one."""
    made = detector(A)

    assert made.on_gossip(news(MemberState.DEAD, OWN, 2), A, 1.0) == []
    assert made.on_gossip(news(MemberState.SUSPECT, OWN, 3), A, 1.0) == [SendPing(A)]
    assert made.on_gossip(news(MemberState.SUSPECT, OWN, 3), A, 1.1) == []
    assert made.stretch == 2.0, "it doubts itself, once"
    made.leave_notice()
    assert made.on_gossip(news(MemberState.SUSPECT, OWN, 3), A, 9.0) == []


def test_a_suspect_is_probed_in_every_round() -> None:
    """One ping a second, until one answer is enough."""
    made = detector(A, B, C, D, now=3.9)
    made.on_unreachable(A, 5.0, "silent")
    probed = [due for due, action in run(made, 7.95) if action == SendPing(A) and due > 5.0]

    assert len(probed) == 3
    assert made.on_heartbeat(A, 1, 7.95) == [StateChanged(A, "refuted", "it sent a message")]


def test_the_death_of_an_unknown_node_is_passed_on_once() -> None:
    """The few that know a node which has just joined hear of its death through those that do not. A later start counts
    anew; suspicions, and deaths of the removed, are not passed on."""
    made = detector(A, B)
    dead, later = news(MemberState.DEAD, C), news(MemberState.DEAD, C, 2)

    assert made.on_gossip(dead, B, 1.0) == [Broadcast(dead)]
    assert made.on_gossip(dead, A, 1.1) == []
    assert made.on_gossip(later, A, 1.2) == [Broadcast(later)]
    assert made.on_gossip(dead, A, 1.3) == []
    assert made.on_gossip(news(MemberState.SUSPECT, D), B, 1.4) == []
    made.declare_dead(A, 1.5, "certain")
    assert made.on_gossip(news(MemberState.DEAD, A), B, 1.6) == []
    for each in ids(400):
        made.on_gossip(news(MemberState.DEAD, each), B, 2.0)
    assert len(made._passed) == MAX_PASSED


def test_a_dead_member_that_answers_others_is_called() -> None:
    """Who hears it says so at once; the others call it, once in a while, and its own answer restores it. (It was: two
    sides of a healed split counted each other a minute late.)"""
    made = detector(A, B)
    made.declare_dead(A, 1.0, "certain")
    alive = news(MemberState.ALIVE, A)

    assert made.on_gossip(alive, B, 2.0) == [SendPing(A), Broadcast(alive)]
    assert made.on_gossip(alive, B, 2.1) == []
    assert not made.is_alive(A)
    assert made.on_response(A, 1, 2.2) == [Broadcast(alive, at_once=True)]
    assert made.on_gossip(alive, B, 20.0) == [], "it is known"
