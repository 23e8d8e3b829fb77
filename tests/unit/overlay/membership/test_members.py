"""The member list, event by event: what it does to the swarm is compared as values, tables are looked into."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
from kademlia.node import Node

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.kademlia.messages import Gossip, MemberState
from p2pnode.overlay.kademlia.routing_table import ContactTable
from p2pnode.overlay.membership import members
from p2pnode.overlay.membership.members import (
    EAGER_VIEW,
    FORGET_S,
    FULL_VIEW,
    MemberList,
    claimed_address,
)
from p2pnode.overlay.peers import Activity, Contact, Heartbeat
from tests.harness.builders.peers import heartbeat, ids
from tests.harness.environment.simulated import make_environment
from tests.harness.stubs.recording_network import Done, RecordingNetwork

OWN, A, B, C = ids(4)
HERE, THERE = Address("10.0.0.1", 8468), Address("10.0.0.2", 8468)
LEAVING = int(Activity.LEAVING)


class SetClock:
    """A test sets the time."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


class Members(MemberList):
    """The member list of one node; it records what it does."""

    def __init__(self) -> None:
        self.clock, self.network = SetClock(), RecordingNetwork()
        table, environment = ContactTable(20, Node(OWN)), make_environment(clock=self.clock)
        super().__init__(heartbeat(OWN), table, 20, environment, self.network)

    def done(self) -> list[Done]:
        """Since the last call."""
        return self.network.take()

    def answered(self, seen: Heartbeat, source: Address, asked: Address | None = None, *, proven: bool = True) -> None:
        """The node that was asked at `asked`, or else at `source`, has answered."""
        self.on_response(seen, source, 0.01, Contact(seen.node_id, asked or source), proven=proven)

    def insert(self, node_id: bytes, address: Address = HERE, **changes: object) -> None:
        """The node has answered at its address with a proof."""
        self.answered(heartbeat(node_id, port=address.port, **changes), address)
        assert self.contact(node_id) == Contact(node_id, address)
        self.done()

    def listed(self) -> list[bytes]:
        """The nodes of the routing table."""
        return [entry.node_id for entry in self._table]


# -- insertion


def test_only_a_proven_response_inserts() -> None:
    """A request is verified at its claimed address, an unproven response again; the proof inserts everywhere."""
    made = Members()
    made.on_request(heartbeat(A), HERE)
    made.answered(heartbeat(A), HERE, proven=False)

    assert made.done() == [("verify", Contact(A, HERE))] * 2
    assert len(made.peers) == 0
    made.answered(heartbeat(A), HERE)
    assert made.done() == [("up", A)]
    assert A in made.peers
    assert made.detector.is_alive(A)
    assert A in made.listed()


def test_a_request_from_elsewhere_is_verified_at_both_addresses() -> None:
    """The claimed address first, then the source, which may be that of a NAT. One that leaves is not verified."""
    made = Members()
    made.on_request(heartbeat(A, host=THERE.host), HERE)

    assert made.done() == [("verify", Contact(A, THERE)), ("verify", Contact(A, HERE))]
    made.on_request(heartbeat(A, activity=LEAVING), HERE)
    assert made.done() == []


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit a proven node is refused and counted."""
    monkeypatch.setattr(members, "MAX_PEERS", 1)
    made = Members()
    made.insert(A)
    made.answered(heartbeat(B), THERE)

    assert made.done() == []
    assert made.counters == {"peers_refused_full": 1}


# -- refresh


def test_a_known_peer_is_refreshed_and_nothing_is_sent() -> None:
    """Its request, its response and its stream messages fold the step in."""
    made = Members()
    made.insert(A)
    for now, event in enumerate(
        (
            lambda seen: made.on_request(seen, HERE),
            lambda seen: made.answered(seen, HERE, proven=False),
            lambda seen: made.on_stream_request(seen, Address(HERE.host, 50123)),
            lambda seen: made.on_stream_response(seen, HERE),
        ),
        start=1,
    ):
        made.clock.now = float(now)
        event(heartbeat(A, step=now))
        peer = made.peer(A)
        assert peer is not None
        assert (peer.step, peer.last_heard) == (now, now)
    assert made.done() == []


def test_a_peer_that_leaves_is_removed_at_once() -> None:
    """By its heartbeat; it is gone, and not among the dead that are called again."""
    made = Members()
    made.insert(A)
    made.on_request(heartbeat(A, activity=LEAVING), HERE)

    assert made.done() == [("left", A), ("broadcast", Gossip(MemberState.LEFT, A, 1))]
    assert made.peer(A) is None
    assert made.dead_contacts == {}


# -- moves


def test_a_restarted_node_replaces_its_old_address_with_a_proof() -> None:
    """A higher incarnation elsewhere: verified first, then moved."""
    made = Members()
    made.insert(A)
    seen = heartbeat(A, incarnation=2, boot_id=8)
    made.on_request(seen, THERE)

    assert made.done() == [("verify", Contact(A, THERE))]
    made.answered(seen, THERE)
    assert made.done() == [("restarted", A)]
    assert made.contact(A) == Contact(A, THERE)


def test_the_same_start_at_another_address_moves_only_when_the_old_one_is_silent() -> None:
    """The known address is checked; its answer changes nothing, its time-out moves the peer."""
    made = Members()
    made.insert(A)
    made.answered(heartbeat(A), THERE)

    assert made.done() == [("check", Contact(A, HERE))]
    assert made.contact(A) == Contact(A, HERE)
    made.network.otherwise()
    assert made.done() == [("moved", A)]
    assert made.contact(A) == Contact(A, THERE)


def test_a_node_behind_a_nat_is_inserted_where_it_answers() -> None:
    """It claims another address: that one is checked first. Its streams do not reach the NAT's port."""
    made = Members()
    source = Address("203.0.113.5", 40001)
    made.answered(heartbeat(A, host="10.9.9.9"), source)

    assert made.done() == [("check", Contact(A, Address("10.9.9.9", 8468)))]
    made.network.otherwise()
    assert made.done() == [("up", A)]
    assert made.contact(A) == Contact(A, source)
    assert not made.takes_streams(A)
    made.network.otherwise()
    assert made.done() == [], "known by now"


def test_the_claimed_address_of_a_node_behind_a_nat_is_verified_once_and_then_preferred() -> None:
    """A port mapping may have opened since: a proven answer there moves the peer, and streams reach it."""
    made = Members()
    source, claimed = Address("203.0.113.5", 40001), Address("203.0.113.5", 8468)
    made.answered(heartbeat(A), source)
    made.network.otherwise()
    made.done()

    for _ in range(2):
        made.on_request(heartbeat(A), source)
    assert made.done() == [("verify", Contact(A, claimed))]
    made.answered(heartbeat(A), claimed)
    assert made.done() == [("moved", A)]
    assert made.takes_streams(A)


def test_another_id_at_a_known_address_replaces_the_old_one() -> None:
    """The old id is dead, its address is another's."""
    made = Members()
    made.insert(A)
    made.on_id_mismatch(heartbeat(B), HERE, Contact(A, HERE), proven=True)

    assert made.done() == [("dead", A), ("broadcast", Gossip(MemberState.DEAD, A, 1)), ("up", B)]
    assert made.negative.is_silent(Contact(A, HERE), 0.1)
    assert made.peers.at(HERE) == B


def test_an_older_start_at_the_same_address_is_a_directory_put_back() -> None:
    """Two processes cannot share an address: the known start is dead, the older one is inserted."""
    made = Members()
    made.insert(A, incarnation=5)
    made.answered(heartbeat(A, incarnation=4, boot_id=9), HERE)

    assert [done for done in made.done() if done[0] in ("dead", "returned")] == [("dead", A), ("returned", A)]
    peer = made.peer(A)
    assert peer is not None
    assert peer.incarnation == 4


def test_two_starts_at_two_addresses_are_a_conflict() -> None:
    """Both get a report; the one that is known stays. Another process with the own id is verified, and no peer."""
    made = Members()
    made.insert(A)
    made.on_request(heartbeat(A, boot_id=9), THERE)

    assert [done[0] for done in made.done()] == ["clone", "report", "report"]
    assert made.counters == {"twins_told": 1}
    assert made.contact(A) == Contact(A, HERE)
    made.on_request(heartbeat(OWN, boot_id=9), HERE)
    assert made.done() == [("verify oneself", Contact(OWN, HERE))] * 2


# -- suspicion and death


def test_time_outs_lead_to_indirect_probes_and_suspected_contacts_are_not_handed_out() -> None:
    """Others are asked first; a suspect stays a peer and is listed again after its next message."""
    made = Members()
    made.insert(A)
    made.insert(B, THERE)
    made.on_timeout(Contact(A, HERE))

    assert made.done() == [("probe through", A, B)]
    made.on_unreachable(A)
    suspected = Gossip(MemberState.SUSPECT, A, 1)
    assert made.done() == [("suspect", A), ("tell", A, suspected), ("broadcast", suspected)]
    assert [entry.node_id for entry in made._table.closest(A, 5)] == [B]
    assert [made.is_doubtful(each) for each in (A, B, C)] == [True, False, False]
    made.on_request(heartbeat(A), HERE)
    assert made.done() == [("refuted", A)]
    assert [entry.node_id for entry in made._table.closest(A, 5)] == [A, B]
    assert not made.is_doubtful(A)


def test_a_time_out_at_a_former_address_is_no_failure() -> None:
    """The negative cache has the old contact, the detector gets no event."""
    made = Members()
    made.insert(A, THERE)
    made.on_timeout(Contact(A, HERE))

    assert made.done() == []
    assert made.negative.is_silent(Contact(A, HERE), 0.1)


def test_a_dead_peer_is_remembered_and_returns() -> None:
    """Its contact is kept for calls; its next proven answer is a return."""
    made = Members()
    made.insert(A)
    made.detector.declare_dead(A, 1.0, "silent")

    assert made.done()[0] == ("dead", A)
    assert made.dead_contacts == {A: Contact(A, HERE)}
    assert A not in made.peers
    assert made.is_doubtful(A)
    made.answered(heartbeat(A), HERE)
    assert made.done() == [("broadcast at once", Gossip(MemberState.ALIVE, A, 1)), ("returned", A)]
    assert made.dead_contacts == {}


def test_gossip_reaches_the_detector_and_changes_follow() -> None:
    """A leave from the node itself removes it; gossip about an unknown node does nothing."""
    made = Members()
    made.insert(A)
    made.on_gossip(Gossip(MemberState.SUSPECT, B, 1), A)
    assert made.done() == []
    left = Gossip(MemberState.LEFT, A, 1)
    made.on_gossip(left, A)
    assert made.done() == [("left", A), ("broadcast", left)]
    assert A not in made.peers


# -- forgetting


def test_unused_peers_are_dropped_in_a_large_swarm_only() -> None:
    """Beyond the full view: neither in a bucket nor kept, and without a message for long."""
    made = Members()
    many = ids(FULL_VIEW + 200, seed=5)
    for number, node_id in enumerate(many):
        made.insert(node_id, Address("10.1.0.1", 1 + number))
    outside = [node_id for node_id in many if node_id not in made._table]
    assert len(outside) > 2

    made.clock.now = FORGET_S - 1
    made.forget_unused([outside[0]])
    assert len(made.peers) == len(many)
    made.clock.now = FORGET_S + 1
    made.forget_unused([outside[0]])
    assert outside[0] in made.peers
    assert not [node_id for node_id in outside[1:] if node_id in made.peers]
    assert [node_id for node_id in made.listed() if node_id not in made.peers] == []


def test_addresses_without_answers_are_forgotten_with_the_unused() -> None:
    """Of a swarm of any size: otherwise each that ever timed out stays for as long as its node does not answer."""
    made = Members()
    made.on_timeout(Contact(A, HERE))
    for made.clock.now, remembered in ((30.0, 1), (200.0, 0)):
        made.forget_unused([])
        assert len(made.negative) == remembered


def test_the_claimed_address_is_the_advertised_host_or_the_source() -> None:
    """A host that is no address of a node is ignored."""
    assert claimed_address(heartbeat(A, port=9), HERE) == Address(HERE.host, 9)
    assert claimed_address(heartbeat(A, host="10.7.7.7"), HERE) == Address("10.7.7.7", 8468)
    assert claimed_address(heartbeat(A, host="0.0.0.0"), HERE) == HERE


# -- cost


def test_a_stranger_is_verified_at_once_only_where_few_are_known_or_a_bucket_takes_it() -> None:
    """With many peers the buckets decide: not every one of N nodes makes a proof for each of the others that asks."""
    made = Members()
    many = ids(FULL_VIEW, seed=6)

    def verified() -> list[bytes]:
        made.done()
        for node_id in many[EAGER_VIEW + 1 :]:
            made.on_request(heartbeat(node_id, port=9), Address("10.2.0.1", 9))
        return [done[1].node_id for done in made.done()]

    for number, node_id in enumerate(many[: EAGER_VIEW - 1]):
        made.insert(node_id, Address("10.1.0.1", 1 + number))
    assert verified() == many[EAGER_VIEW + 1 :], "few are known"
    made.insert(many[EAGER_VIEW], Address("10.1.0.2", 1))
    assert verified() == [each for each in many[EAGER_VIEW + 1 :] if made._table.would_insert(each)]
    assert 0 < len(verified()) < len(many) - EAGER_VIEW - 1
    made.insert(many[-1], Address("10.1.0.3", 1))
    assert many[-1] in made.peers, "one that answers this node is a peer, whatever the buckets take"


def bytes_of_members(count: int) -> int:
    """Bytes that a member list with so many peers takes, each met twice, as allocated by Python."""
    gc.collect()
    tracemalloc.start()
    try:
        made = Members()
        for number, node_id in enumerate(ids(count)):
            for now in (1.5, 2.5):
                made.clock.now = now
                address = Address("10.1.0.1", 1000 + number)
                seen = heartbeat(bytes(bytearray(node_id)), port=address.port, boot_id=1 << 60, step_seconds=now)
                made.on_response(seen, address, now / 7, Contact(seen.node_id, address), proven=True)
                made.done()
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
        assert len(made.peers) == count
        return held
    finally:
        tracemalloc.stop()


def test_a_peer_takes_less_than_a_kilobyte() -> None:
    """In peer list, failure detector and routing table together: a thousand simulated nodes have a few hundred each."""
    growth = (bytes_of_members(240) - bytes_of_members(80)) / 160
    print(f"{growth:.0f} bytes")
    assert growth < 800


# -- members that do not answer this node


def test_a_node_that_only_others_reach_is_a_member_and_no_contact() -> None:
    """It is known with its step and counts as alive; it is in no routing table, and takes no streams."""
    made = Members()
    made.insert(A)
    made.on_relayed(heartbeat(B, step=4), Contact(B, THERE), A)

    assert made.done() == [("up", B)]
    peer = made.peer(B)
    assert peer is not None
    assert (peer.step, peer.address, made.helper(B)) == (4, THERE, made.contact(A))
    assert made.detector.is_alive(B)
    assert not made.is_verified(B)
    assert not made.takes_streams(B)
    assert B not in made._table
    made.clock.now = 2.0
    made.on_relayed(heartbeat(B, step=5), Contact(B, THERE), A)
    assert (peer.step, peer.last_heard) == (5, 2.0)


def test_its_own_proven_response_makes_it_a_contact() -> None:
    """One without a proof does not."""
    made = Members()
    made.insert(A)
    made.on_relayed(heartbeat(B), Contact(B, THERE), A)

    made.answered(heartbeat(B), THERE, proven=False)
    assert not made.is_verified(B)
    made.answered(heartbeat(B), THERE)
    assert made.is_verified(B)
    assert made.helper(B) is None
    assert made.takes_streams(B)
    assert B in made._table


def test_a_member_that_stopped_answering_keeps_its_place_and_others_ask_for_it() -> None:
    """A hole that opens later: it stays verified. No other node is asked through it, and it tells nobody of others."""
    made = Members()
    elsewhere = Address("10.0.0.3", 8468)
    for node_id, address in ((A, HERE), (B, THERE), (C, elsewhere)):
        made.insert(node_id, address)
    made.on_relayed(heartbeat(B, step=7), Contact(B, THERE), A)

    assert (made.helper(B), made.is_verified(B)) == (made.contact(A), True)
    assert made.heard_directly(B, 0.0) is None
    assert made.heard_directly(A, 0.0) is not None
    assert made.heard_directly(A, 1.0) is None
    made.on_timeout(Contact(C, elsewhere))
    assert made.done() == [("probe through", C, A)]
    made.answered(heartbeat(B, step=7), THERE, proven=False)
    assert made.helper(B) is None


@pytest.mark.parametrize(
    ("known", "relayed"),
    [
        ({}, {"boot_id": 8}),
        ({"incarnation": 2}, {}),
    ],
    ids=["another process", "an older start"],
)
def test_what_another_start_says_is_not_relayed(known: dict[str, int], relayed: dict[str, int]) -> None:
    """What the node said itself stays."""
    made = Members()
    made.insert(A)
    made.insert(B, THERE, step=9, **known)
    made.on_relayed(heartbeat(B, step=3, **relayed), Contact(B, THERE), A)

    assert made.done() == []
    peer = made.peer(B)
    assert peer is not None
    assert (peer.step, made.helper(B)) == (9, None)


def test_a_relayed_node_takes_nobodys_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the own id, not the address of another, not for a node that leaves, and not in a full view."""
    made = Members()
    made.insert(A)
    made.on_relayed(heartbeat(OWN), Contact(OWN, THERE), A)
    made.on_relayed(heartbeat(C), Contact(B, THERE), A)
    made.on_relayed(heartbeat(B), Contact(B, HERE), A)
    made.on_relayed(heartbeat(B, activity=LEAVING), Contact(B, THERE), A)
    monkeypatch.setattr(members, "FULL_VIEW", 1)
    made.on_relayed(heartbeat(B), Contact(B, THERE), A)

    assert made.done() == []
    assert made.peers.ids() == [A]


def test_a_relayed_leave_removes_a_member() -> None:
    """As its own message would."""
    made = Members()
    made.insert(A)
    made.on_relayed(heartbeat(B), Contact(B, THERE), A)
    made.done()
    made.on_relayed(heartbeat(B, activity=LEAVING), Contact(B, THERE), A)

    assert made.done()[0] == ("left", B)
    assert made.helper(B) is None
    assert made.is_verified(B)
