"""The failure detector, message by message and state by state: what it does is compared as values."""

from __future__ import annotations

import itertools
import random

import pytest

from p2pnode.overlay.kademlia.messages import Gossip, MemberState
from p2pnode.overlay.membership.failure_detector import (
    GOSSIP_PAUSE_S,
    MAX_PASSED,
    MAX_SUSPECTS_PER_ROUND,
    FailureDetector,
)
from tests.harness.builders.peers import ids
from tests.harness.stubs.recording_network import Done, RecordingNetwork

OWN, A, B, C, D = (bytes([number]) * 20 for number in (0, 1, 2, 3, 4))


class Detector(FailureDetector):
    """It records what it does."""

    def __init__(self, *members: bytes, now: float = 0.0) -> None:
        self.network = RecordingNetwork()
        super().__init__(OWN, 3, random.Random(1), now, self.network, self.network.changed)
        for member in members:
            self.on_response(member, 1, now)
        assert self.done() == []

    def done(self) -> list[Done]:
        """Since the last call."""
        return self.network.take()


def news(kind: MemberState, node_id: bytes, incarnation: int = 1) -> Gossip:
    return Gossip(kind, node_id, incarnation)


def run(made: Detector, until: float) -> list[tuple[float, Done]]:
    """Tick at every deadline."""
    seen: list[tuple[float, Done]] = []
    while (due := made.next_deadline()) <= until:
        made.tick(due)
        seen += [(due, done) for done in made.done()]
    return seen


def probes(seen: list[tuple[float, Done]]) -> list[tuple[float, bytes]]:
    """When each was probed."""
    return [(due, done[1]) for due, done in seen if done[0] == "probe"]


def changes(seen: list[tuple[float, Done]]) -> list[tuple[float, str, bytes]]:
    """When what was found of whom."""
    return [(due, done[0], done[1]) for due, done in seen if done[0] in ("suspect", "refuted", "dead", "left")]


def test_every_member_is_probed_within_one_pass() -> None:
    """Round-robin: four silent members, one probe a second, each exactly once per pass."""
    made = Detector(A, B, C, D, now=-10.0)
    probed = [node_id for _, node_id in probes(run(made, 7.99 - 2))]

    assert sorted(probed[:4]) == [A, B, C, D]


def test_watched_members_are_probed_in_every_round() -> None:
    """Watched members every second, until one of their messages arrives."""
    made = Detector(A, B, C, D)
    made.watch([C])
    rounds = [due for due, node_id in probes(run(made, 10.0)) if node_id == C]

    assert len(rounds) >= 9
    assert max(b - a for a, b in itertools.pairwise(rounds)) <= 1.001


def test_a_member_that_just_sent_something_is_not_probed() -> None:
    """A message within half the interval replaces the probe."""
    made = Detector(A)
    made.watch([A])
    due = made.next_deadline()
    made.on_heartbeat(A, 1, due - 0.4)
    made.tick(due)

    assert made.done() == []


def test_time_outs_lead_through_indirect_probes_to_suspicion_and_death() -> None:
    """Direct ping, indirect ping, suspicion (sent to the suspect), death after suspicion_s (broadcast at once)."""
    made = Detector(A, B, C)
    made.on_timeout(A, 10.0, others=[A, B, C])
    assert made.done() == [("probe through", A, B, C)]

    made.on_unreachable(A, 10.5, "silent")
    suspected = news(MemberState.SUSPECT, A)
    assert made.done() == [("suspect", A, "silent"), ("tell", A, suspected), ("broadcast", suspected)]
    assert made.is_suspect(A)
    assert made.is_alive(A)
    made._planned = 10.6
    made.tick(10.6)
    assert ("probe", A) in made.done()
    for _ in range(3):
        made.on_timeout(A, 10.9, others=[B, C])
    assert made.done() == []
    made._planned = 13.5
    made.tick(13.5)
    dead = news(MemberState.DEAD, A)
    death = ("dead", A, "suspected for 3.0 s and silent")
    assert made.done()[:3] == [death, ("tell", A, dead), ("broadcast at once", dead)]
    assert not made.is_alive(A)
    assert made.dead() == [A]


def test_without_helpers_a_time_out_is_a_suspicion_at_once() -> None:
    """In a swarm of two no other node can ping it."""
    made = Detector(A)
    made.on_timeout(A, 1.0, others=[])

    assert made.done()[0] == ("suspect", A, "it does not answer")


def test_no_member_is_removed_before_it_left_our_own_probes_unanswered() -> None:
    """A suspicion is extended until three probes were left unanswered; the third ends it."""
    made = Detector(A, B, now=2.0)
    made.on_timeout(A, 2.5, others=[B])
    made.on_unreachable(A, 3.0, "silent")
    made.done()
    made.on_timeout(A, 4.0, others=[B])
    made.on_timeout(A, 5.0, others=[B])
    assert changes(run(made, 6.5)) == [], "time-outs before the suspicion do not count"
    assert made.is_suspect(A)

    made.on_timeout(A, 6.5, others=[B])
    assert made.done() == []
    assert [kind for _, kind, _ in changes(run(made, 6.8))] == ["dead"]


def run_unanswered(made: Detector, until: float, answering: bytes = b"") -> list[tuple[float, Done]]:
    """Tick at every deadline; no ping is answered, except by this one."""
    seen: list[tuple[float, Done]] = []
    while (due := made.next_deadline()) <= until:
        made.tick(due)
        done = made.done()
        for _, node_id in probes([(due, each) for each in done]):
            if node_id == answering:
                made.on_heartbeat(node_id, 1, due + 0.01)
            else:
                made.on_timeout(node_id, due + 0.2, others=[])
        seen += [(due, each) for each in (*done, *made.done())]
    return seen


def test_many_suspects_take_turns_and_none_dies_before_it_left_three_probes_unanswered() -> None:
    """Two hundred at once: sixteen are probed in a round, those not probed yet first. After twice the time of a
    suspicion each is probed out of turn until it answers, or has left three unanswered. (It was: at that moment all
    were dead, a living one too whose one answer was lost.)"""
    nodes = ids(200)
    made = Detector(*nodes, now=1.9)
    for node_id in nodes:
        made.on_unreachable(node_id, 2.0, "silent")
    seen = run_unanswered(made, 11.0, answering=nodes[150])

    asked = [node_id for due, node_id in probes(seen) if 2.0 < due < 5.0]
    assert len(asked) <= 3 * 18
    assert set(asked) >= set(nodes[:32])
    unasked = [node_id for due, node_id in probes(seen) if due < 8.0].count(nodes[150])
    assert unasked == 0, "its turn has not come"
    assert [due for due, node_id in probes(seen) if node_id == nodes[150] and due < 9.0] == [pytest.approx(8.0)]
    found = {node_id: due for due, kind, node_id in changes(seen) if kind == "dead"}
    assert set(found) == {*nodes} - {nodes[150]}
    assert max(found.values()) <= 2.0 + 6.0 + 3 * 0.5 + 0.25
    for node_id, died in found.items():
        assert sum(each == node_id and due < died for due, each in probes(seen)) >= 3


def test_a_suspect_is_not_probed_out_of_turn_while_its_last_probe_waits_for_an_answer() -> None:
    """The pause is the longest wait of a call: half a second, and more while this node lags."""
    made = Detector(A, B, now=1.0)
    made.on_unreachable(A, 2.0, "silent")
    made._next_round = 100.0
    assert [due for due, _ in probes(run(made, 9.6))] == [pytest.approx(8.0 + 0.5 * each) for each in range(4)]
    made.health.score = 2  # a punctual tick lowers it by one
    made._planned = 10.5
    made.tick(10.0)
    assert made.done() == [], "the last was half a second ago"
    made.health.score = 2  # a punctual tick lowers it by one
    made._planned = 10.5
    made.tick(10.5)
    assert made.done() == [("probe", A)]


def test_a_reported_death_of_a_silent_suspect_is_accepted_at_once() -> None:
    """Three probes were left unanswered already: no further probe is sent."""
    made = Detector(A, B)
    made.on_unreachable(A, 5.0, "silent")
    for at in (6.0, 7.0, 7.1):
        made.on_timeout(A, at, others=[B])
    made.done()

    made.on_gossip(news(MemberState.DEAD, A), B, 7.2)
    assert made.done()[0][:2] == ("dead", A)


def test_a_lagging_loop_extends_deadlines_and_time_outs() -> None:
    """A tick 5 s late moves every deadline by 5 s and stretches time-outs; in-time ticks shrink them again."""
    made = Detector(A)
    made.on_unreachable(A, 0.5, "silent")
    made._members[A].missed = 3
    due = made.next_deadline()
    made.tick(due + 5.0)

    assert made.is_alive(A), "3 s of suspicion had passed, but the loop lagged"
    assert made.health.stretch == 2.0
    made.tick(made.next_deadline())
    assert made.health.stretch == 1.0
    made.done()
    assert changes(run(made, 20.0)) == [(pytest.approx(0.5 + 3.0 + 5.0), "dead", A)]


def test_a_requested_probe_is_sent_at_once_and_not_repeated() -> None:
    """A second request within 0.2 s adds nothing, nor does one for an unknown node."""
    made = Detector(A)

    assert [made.request_probe(*asked) for asked in ((A, 1.0), (A, 1.1), (B, 1.1))] == [True, False, False]
    assert made.done() == [("probe", A)]


def test_a_member_that_leaves_is_removed_and_not_called_again() -> None:
    """By its heartbeat or by its gossip; it is not among the dead."""
    made = Detector(A, B)
    made.on_leave(A, 1.0)
    made.on_gossip(news(MemberState.LEFT, B), B, 9.0)

    assert [done for done in made.done() if done[0] == "left"] == [("left", A, "it left"), ("left", B, "it left")]
    assert made.dead() == []


def test_with_many_suspects_no_others_are_asked_to_ping_one_more() -> None:
    """Half a swarm that died is not pinged through the other half; the suspicion is the same as after those."""
    many = [bytes([100 + number]) * 20 for number in range(MAX_SUSPECTS_PER_ROUND)]
    made = Detector(A, B, *many)
    for each in many[:-1]:
        made.on_unreachable(each, 1.0, "silent")
    made.done()
    made.on_timeout(A, 2.0, others=[A, B])
    assert made.done() == [("probe through", A, B)]
    made.on_unreachable(many[-1], 2.0, "silent")
    made.done()
    made.on_timeout(A, 3.0, others=[A, B])
    suspected = news(MemberState.SUSPECT, A)
    reason = "it does not answer, as many others do not"
    assert made.done() == [("suspect", A, reason), ("tell", A, suspected), ("broadcast", suspected)]


def test_each_of_hundreds_of_suspects_dies_at_its_own_deadline() -> None:
    """One thousandth of a second apart, in the order in which they were suspected."""
    everybody = [number.to_bytes(20, "big") for number in range(1000, 1400)]
    made = Detector(*everybody)
    made.tick(made.next_deadline())
    for number, each in enumerate(everybody):
        made.on_unreachable(each, 1.0 + 0.001 * number, "silent")
        made._members[each].missed = 3
    made.done()
    deaths = [(due, node_id) for due, kind, node_id in changes(run(made, 4.9)) if kind == "dead"]

    assert deaths == [(pytest.approx(4.0 + 0.001 * number), each) for number, each in enumerate(everybody)]


def test_gossip_is_a_reason_to_probe_and_no_evidence() -> None:
    """A suspicion is passed on, and asked about once in a while. A death, or a leave that others report, is asked about
    and not passed on. What the member sent a moment ago, or an older start, is no reason."""
    for kind in (MemberState.SUSPECT, MemberState.DEAD, MemberState.LEFT):
        made, heard = Detector(A, B), news(kind, A, 2)
        made.on_heartbeat(A, 2, 4.5)
        made.on_gossip(heard, B, 5.0)
        made.on_gossip(news(kind, A), B, 9.0)
        assert made.done() == []
        asked = [("probe", A), ("broadcast", heard)] if kind is MemberState.SUSPECT else [("probe", A)]
        made.on_gossip(heard, B, 9.0)
        assert made.done() == asked
        made.on_gossip(heard, C, 9.5)
        assert made.done() == []
        assert made.is_alive(A)
        assert not made.is_suspect(A)
        made.on_heartbeat(A, 2, 9.6)
        made.on_gossip(heard, C, 9.0 + GOSSIP_PAUSE_S)
        assert made.done() == asked


def test_a_reported_death_is_confirmed_by_our_own_probes() -> None:
    """Asked at once, three times; a second report adds nothing. Silence removes it, an answer ends the suspicion."""
    dead, reason = news(MemberState.DEAD, A), "others report it dead, and it does not answer this node"
    silent, answering = Detector(A, B, C), Detector(A, B, C)
    for made in (silent, answering):
        made.on_gossip(dead, B, 5.0)
        assert made.done() == [("probe", A)]
        made.on_timeout(A, 5.2, others=[B, C])
        assert made.done() == [("suspect", A, "others report it dead"), ("probe", A)]
        made.on_gossip(dead, C, 5.3)
        assert made.done() == []
        made.on_timeout(A, 5.4, others=[B, C])
        assert made.done() == [("probe", A)]

    silent.on_timeout(A, 5.6, others=[B, C])
    assert silent.done() == [("dead", A, reason), ("broadcast", dead)]
    assert not silent.is_alive(A)
    answering.on_heartbeat(A, 1, 5.6)
    assert answering.done() == [("refuted", A, "it sent a message")]
    assert not answering.is_suspect(A)
    answering.on_timeout(A, 9.0, others=[B, C])
    assert answering.done() == [("probe through", A, B, C)], "a later time-out begins anew"


def test_a_node_that_is_suspected_pings_who_said_so() -> None:
    """Any message of its own ends the suspicion there. Gossip about a former start is none about this one."""
    made = Detector(A)
    made.on_gossip(news(MemberState.DEAD, OWN, 2), A, 1.0)
    assert made.done() == []
    for at in (1.0, 1.1):
        made.on_gossip(news(MemberState.SUSPECT, OWN, 3), A, at)
    assert made.done() == [("probe", A)]
    assert made.health.stretch == 2.0, "it doubts itself, once"
    made.leave_notice()
    made.on_gossip(news(MemberState.SUSPECT, OWN, 3), A, 9.0)
    assert made.done() == []


def test_a_suspect_is_probed_in_every_round() -> None:
    """One ping a second, until one answer is enough."""
    made = Detector(A, B, C, D, now=3.9)
    made.on_unreachable(A, 5.0, "silent")
    probed = [due for due, node_id in probes(run(made, 7.95)) if node_id == A and due > 5.0]

    assert len(probed) == 3
    made.on_heartbeat(A, 1, 7.95)
    assert made.done() == [("refuted", A, "it sent a message")]


def test_the_death_of_an_unknown_node_is_passed_on_once() -> None:
    """The few that know a node which has just joined hear of its death through those that do not. A later start counts
    anew; suspicions, and deaths of the removed, are not passed on."""
    made = Detector(A, B)
    dead, later = news(MemberState.DEAD, C), news(MemberState.DEAD, C, 2)
    for heard in (dead, dead, later, dead, news(MemberState.SUSPECT, D)):
        made.on_gossip(heard, B, 1.0)
    assert made.done() == [("broadcast", dead), ("broadcast", later)]

    made.declare_dead(A, 1.5, "certain")
    made.done()
    made.on_gossip(news(MemberState.DEAD, A), B, 1.6)
    assert made.done() == []
    for each in ids(400):
        made.on_gossip(news(MemberState.DEAD, each), B, 2.0)
    assert len(made._passed) == MAX_PASSED


def test_a_dead_member_that_answers_others_is_called() -> None:
    """Who hears it says so at once; the others call it, once in a while, and its own answer restores it. (It was: two
    sides of a healed split counted each other a minute late.)"""
    made = Detector(A, B)
    made.declare_dead(A, 1.0, "certain")
    made.done()
    alive = news(MemberState.ALIVE, A)

    for at in (2.0, 2.1):
        made.on_gossip(alive, B, at)
    assert made.done() == [("probe", A), ("broadcast", alive)]
    assert not made.is_alive(A)
    made.on_response(A, 1, 2.2)
    assert made.done() == [("broadcast at once", alive)]
    made.on_gossip(alive, B, 20.0)
    assert made.done() == [], "it is known"
