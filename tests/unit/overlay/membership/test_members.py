"""The member list, event by event: actions are compared as values, tables are looked into."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest
from kademlia.node import Node

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.kademlia.messages import Gossip, MemberState
from p2pnode.overlay.kademlia.routing_table import ContactTable
from p2pnode.overlay.membership import members
from p2pnode.overlay.membership.actions import (
    Action,
    AddressClaim,
    Broadcast,
    CheckAddress,
    Notify,
    SendDuplicateIdentity,
    SendNow,
    SendPingRequest,
    StateChanged,
    Verify,
)
from p2pnode.overlay.membership.failure_detector import FailureDetector
from p2pnode.overlay.membership.members import (
    EAGER_VIEW,
    FORGET_S,
    FULL_VIEW,
    MAX_ENTRIES,
    MAX_PAUSE_S,
    MemberList,
    NegativeCache,
    claimed_address,
)
from p2pnode.overlay.peers import Activity, Contact, PeerChange
from p2pnode.overlay.settings import LivenessSettings
from tests.harness.builders.peers import contact, heartbeat, ids

OWN, A, B, C = ids(4)
HERE, THERE = Address("10.0.0.1", 8468), Address("10.0.0.2", 8468)


def member_list() -> MemberList:
    detector = FailureDetector(OWN, 1, LivenessSettings(), random.Random(1), 0.0)
    table = ContactTable(20, Node(OWN))
    return MemberList(OWN, 7, detector, table, 20)


def insert(made: MemberList, node_id: bytes, address: Address = HERE, now: float = 0.0, **changes: object) -> None:
    """The node has answered at its address with a proof."""
    seen = heartbeat(node_id, port=address.port, **changes)
    made.on_response(seen, address, 0.01, Contact(node_id, address), now, proven=True)
    assert made.contact(node_id) == Contact(node_id, address)


def changes(actions: object) -> list[tuple[bytes, str]]:
    return [(action.change.node_id, action.change.kind) for action in actions if isinstance(action, Notify)]  # type: ignore[attr-defined]


# -- insertion


def test_only_a_proven_response_inserts() -> None:
    """A request is verified at its claimed address, an unproven response again; the proof inserts everywhere."""
    made = member_list()

    assert made.on_request(heartbeat(A), HERE, 0.0) == (Verify(Contact(A, HERE)),)
    assert made.on_response(heartbeat(A), HERE, 0.01, Contact(A, HERE), 0.1) == (Verify(Contact(A, HERE)),)
    assert len(made.peers) == 0
    actions = made.on_response(heartbeat(A), HERE, 0.01, Contact(A, HERE), 0.2, proven=True)
    assert actions == [Notify(PeerChange(A, "up"))]
    assert A in made.peers
    assert made.detector.is_alive(A)
    assert A in [contact.node_id for contact in made._table]


def test_a_request_from_elsewhere_is_verified_at_both_addresses() -> None:
    """The claimed address first, then the source, which may be that of a NAT."""
    made = member_list()
    seen = heartbeat(A, host=THERE.host)

    assert made.on_request(seen, HERE, 0.0) == (Verify(Contact(A, THERE)), Verify(Contact(A, HERE)))


def test_a_node_that_leaves_is_not_verified() -> None:
    """An unknown node that announces its leave is ignored."""
    assert member_list().on_request(heartbeat(A, activity=int(Activity.LEAVING)), HERE, 0.0) == ()


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit a proven node is refused and counted."""
    monkeypatch.setattr(members, "MAX_PEERS", 1)
    made = member_list()
    insert(made, A)

    assert made.on_response(heartbeat(B), THERE, 0.01, Contact(B, THERE), 0.0, proven=True) == ()
    assert made.counters == {"peers_refused_full": 1}


# -- refresh


def test_a_known_peer_is_refreshed_without_actions() -> None:
    """Its request, its response and its stream messages fold the step in; nothing is sent."""
    made = member_list()
    insert(made, A)
    for now, event in enumerate(
        (
            lambda seen, now: made.on_request(seen, HERE, now),
            lambda seen, now: made.on_response(seen, HERE, 0.01, Contact(A, HERE), now),
            lambda seen, now: made.on_stream_request(seen, Address(HERE.host, 50123), now),
            lambda seen, now: made.on_stream_response(seen, HERE, now),
        ),
        start=1,
    ):
        assert not event(heartbeat(A, step=now), float(now))
        peer = made.peer(A)
        assert peer is not None
        assert (peer.step, peer.last_heard) == (now, now)


def test_a_peer_that_leaves_is_removed_at_once() -> None:
    """By its heartbeat; it is gone, and not among the dead that are called again."""
    made = member_list()
    insert(made, A)
    actions = made.on_request(heartbeat(A, activity=int(Activity.LEAVING)), HERE, 1.0)

    assert changes(actions) == [(A, "left")]
    assert isinstance(actions[1], Broadcast)
    assert made.peer(A) is None
    assert made.dead_contacts == {}


# -- moves


def test_a_restarted_node_replaces_its_old_address_with_a_proof() -> None:
    """A higher incarnation elsewhere: verified first, then moved."""
    made = member_list()
    insert(made, A)
    seen = heartbeat(A, incarnation=2, boot_id=8)

    assert made.on_request(seen, THERE, 1.0) == (Verify(Contact(A, THERE)),)
    actions = made.on_response(seen, THERE, 0.01, Contact(A, THERE), 1.1, proven=True)
    assert changes(actions) == [(A, "restarted")]
    assert made.contact(A) == Contact(A, THERE)


def test_the_same_start_at_another_address_moves_only_when_the_old_one_is_silent() -> None:
    """The known address is checked; its answer changes nothing, its time-out moves the peer."""
    made = member_list()
    insert(made, A)
    seen = heartbeat(A)
    actions = made.on_response(seen, THERE, 0.01, Contact(A, THERE), 1.0, proven=True)

    claim = AddressClaim(seen, THERE, 0.01, known=True)
    assert actions == (CheckAddress(Contact(A, HERE), claim),)
    assert changes(made.on_unanswered_check(claim, 2.0)) == [(A, "moved")]
    assert made.contact(A) == Contact(A, THERE)


def test_a_node_behind_a_nat_is_inserted_where_it_answers() -> None:
    """It claims another address: that one is checked first. Its streams do not reach the NAT's port."""
    made = member_list()
    source = Address("203.0.113.5", 40001)
    seen = heartbeat(A, host="10.9.9.9")
    actions = made.on_response(seen, source, 0.01, Contact(A, source), 0.0, proven=True)

    claim = AddressClaim(seen, source, 0.01, known=False)
    assert actions == (CheckAddress(Contact(A, Address("10.9.9.9", 8468)), claim),)
    made.on_unanswered_check(claim, 1.0)
    assert made.contact(A) == Contact(A, source)
    assert not made.takes_streams(A)
    assert made.on_unanswered_check(claim, 2.0) == (), "known by now"


def test_the_claimed_address_of_a_node_behind_a_nat_is_verified_once_and_then_preferred() -> None:
    """A port mapping may have opened since: a proven answer there moves the peer, and streams reach it."""
    made = member_list()
    source, claimed = Address("203.0.113.5", 40001), Address("203.0.113.5", 8468)
    made.on_unanswered_check(AddressClaim(heartbeat(A), source, 0.01, known=False), 0.0)

    assert made.on_request(heartbeat(A), source, 1.0) == [Verify(Contact(A, claimed))]
    assert not made.on_request(heartbeat(A), source, 2.0)
    actions = made.on_response(heartbeat(A), claimed, 0.01, Contact(A, claimed), 3.0, proven=True)
    assert changes(actions) == [(A, "moved")]
    assert made.takes_streams(A)


def test_another_id_at_a_known_address_replaces_the_old_one() -> None:
    """The old id is dead, its address is another's."""
    made = member_list()
    insert(made, A)
    actions = made.on_id_mismatch(heartbeat(B), HERE, Contact(A, HERE), 1.0, proven=True)

    assert changes(actions) == [(A, "dead"), (B, "up")]
    assert made.negative.is_silent(Contact(A, HERE), 1.1)
    assert made.peers.at(HERE) == B


def test_an_older_start_at_the_same_address_is_a_directory_put_back() -> None:
    """Two processes cannot share an address: the known start is dead, the older one is inserted."""
    made = member_list()
    insert(made, A, incarnation=5)
    seen = heartbeat(A, incarnation=4, boot_id=9)
    actions = made.on_response(seen, HERE, 0.01, Contact(A, HERE), 1.0, proven=True)

    assert changes(actions) == [(A, "dead"), (A, "returned")]
    peer = made.peer(A)
    assert peer is not None
    assert peer.incarnation == 4


def test_two_starts_at_two_addresses_are_a_conflict() -> None:
    """Both get a report; the one that is known stays."""
    made = member_list()
    insert(made, A)
    actions = made.on_request(heartbeat(A, boot_id=9), THERE, 1.0)

    assert [type(action) for action in actions][2:] == [SendDuplicateIdentity, SendDuplicateIdentity]
    assert changes(actions) == [(A, "clone")]
    assert made.counters == {"twins_told": 1}
    assert made.contact(A) == Contact(A, HERE)


def test_our_own_id_is_never_a_peer() -> None:
    """A request under it is verified as a duplicate identity, a contact of it not at all."""
    made = member_list()
    actions = made.on_request(heartbeat(OWN, boot_id=9), HERE, 0.0)

    assert actions == (Verify(Contact(OWN, HERE), False), Verify(Contact(OWN, HERE), False))
    assert made.verify(Contact(OWN, HERE)) == ()


# -- suspicion and death


def test_time_outs_lead_to_indirect_probes_and_suspected_contacts_are_not_handed_out() -> None:
    """Others are asked first; a suspect stays a peer and is listed again after its next message."""
    made = member_list()
    insert(made, A)
    insert(made, B, THERE)

    assert made.on_timeout(Contact(A, HERE), 5.0) == [SendPingRequest(A, (B,))]
    actions: list[Action] = list(made.on_unreachable(A, 6.0))
    suspected = Gossip(MemberState.SUSPECT, A, 1)
    assert changes(actions) == [(A, "suspect")]
    assert actions[1:] == [SendNow(A, suspected), Broadcast(suspected)]
    assert [entry.node_id for entry in made._table.closest(A, 5)] == [B]
    assert [made.is_doubtful(each) for each in (A, B, C)] == [True, False, False]
    assert changes(made.on_request(heartbeat(A), HERE, 6.5)) == [(A, "refuted")]
    assert [entry.node_id for entry in made._table.closest(A, 5)] == [A, B]
    assert not made.is_doubtful(A)


def test_a_time_out_at_a_former_address_is_no_failure() -> None:
    """The negative cache has the old contact, the detector gets no event."""
    made = member_list()
    insert(made, A, THERE)

    assert made.on_timeout(Contact(A, HERE), 5.0) == ()
    assert made.negative.is_silent(Contact(A, HERE), 5.1)


def test_a_dead_peer_is_remembered_and_returns() -> None:
    """Its contact is kept for calls; its next proven answer is a return."""
    made = member_list()
    insert(made, A)
    notify = made.apply(StateChanged(A, "dead", "silent"))
    made.detector.declare_dead(A, 1.0, "silent")

    assert notify == Notify(PeerChange(A, "dead", "silent"))
    assert made.dead_contacts == {A: Contact(A, HERE)}
    assert A not in made.peers
    assert made.is_doubtful(A)
    actions = made.on_response(heartbeat(A), HERE, 0.01, Contact(A, HERE), 9.0, proven=True)
    assert changes(actions) == [(A, "returned")]
    assert made.dead_contacts == {}


def test_gossip_reaches_the_detector_and_changes_follow() -> None:
    """A leave from the node itself removes it; gossip about an unknown node does nothing."""
    made = member_list()
    insert(made, A)

    assert not made.on_gossip(Gossip(MemberState.SUSPECT, B, 1), A, 1.0)
    assert changes(made.on_gossip(Gossip(MemberState.LEFT, A, 1), A, 1.0)) == [(A, "left")]
    assert A not in made.peers


# -- forgetting


def test_unused_peers_are_dropped_in_a_large_swarm_only() -> None:
    """Beyond the full view: neither in a bucket nor kept, and without a message for long."""
    made = member_list()
    many = ids(FULL_VIEW + 200, seed=5)
    for number, node_id in enumerate(many):
        made.on_unanswered_check(
            AddressClaim(heartbeat(node_id), Address("10.1.0.1", 1 + number), 0.01, known=False), 0.0
        )
    outside = [node_id for node_id in many if node_id not in made._table]
    assert len(outside) > 2

    made.forget_unused([outside[0]], FORGET_S - 1)
    assert len(made.peers) == len(many)
    made.forget_unused([outside[0]], FORGET_S + 1)
    assert outside[0] in made.peers
    assert not [node_id for node_id in outside[1:] if node_id in made.peers]
    assert [contact.node_id for contact in made._table if contact.node_id not in made.peers] == []


def test_addresses_without_answers_are_forgotten_with_the_unused() -> None:
    """Of a swarm of any size: otherwise each that ever timed out stays for as long as its node does not answer."""
    made = member_list()
    made.on_timeout(Contact(A, HERE), 1.0)
    made.forget_unused([], 30.0)
    assert len(made.negative) == 1
    made.forget_unused([], 200.0)
    assert len(made.negative) == 0


def test_the_claimed_address_is_the_advertised_host_or_the_source() -> None:
    """A host that is no address of a node is ignored."""
    assert claimed_address(heartbeat(A, port=9), HERE) == Address(HERE.host, 9)
    assert claimed_address(heartbeat(A, host="10.7.7.7"), HERE) == Address("10.7.7.7", 8468)
    assert claimed_address(heartbeat(A, host="0.0.0.0"), HERE) == HERE


# -- cost


def test_a_stranger_is_verified_at_once_only_where_few_are_known_or_a_bucket_takes_it() -> None:
    """With many peers the buckets decide: not every one of N nodes makes a proof for each of the others that asks."""
    made = member_list()
    many = ids(FULL_VIEW, seed=6)
    for number, node_id in enumerate(many[: EAGER_VIEW - 1]):
        insert(made, node_id, Address("10.1.0.1", 1 + number))
    asked = [made.on_request(heartbeat(node_id, port=9), Address("10.2.0.1", 9), 1.0) for node_id in many[EAGER_VIEW:]]
    assert all(asked), "few are known"
    insert(made, many[EAGER_VIEW], Address("10.1.0.2", 1))

    asked = [made.on_request(heartbeat(node_id, port=9), Address("10.2.0.1", 9), 1.0) for node_id in many[EAGER_VIEW:]]
    verified = [bool(actions) for actions in asked[1:]]
    assert verified == [made._table.would_insert(node_id) for node_id in many[EAGER_VIEW + 1 :]]
    assert 0 < sum(verified) < len(verified)
    insert(made, many[-1], Address("10.1.0.3", 1))
    assert many[-1] in made.peers, "one that answers this node is a peer, whatever the buckets take"


def bytes_of_members(count: int) -> int:
    """Bytes that a member list with so many peers takes, each met twice, as allocated by Python."""
    gc.collect()
    tracemalloc.start()
    try:
        made = member_list()
        for number, node_id in enumerate(ids(count)):
            for now in (1.5, 2.5):
                address = Address("10.1.0.1", 1000 + number)
                seen = heartbeat(bytes(bytearray(node_id)), port=address.port, boot_id=1 << 60, step_seconds=now)
                made.on_response(seen, address, now / 7, Contact(seen.node_id, address), now, proven=True)
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
    made = member_list()
    insert(made, A)

    actions = made.on_relayed(heartbeat(B, step=4), Contact(B, THERE), A, 1.0)
    assert actions == [Notify(PeerChange(B, "up"))]
    peer = made.peer(B)
    assert peer is not None
    assert (peer.step, peer.address, made.helper(B)) == (4, THERE, made.contact(A))
    assert made.detector.is_alive(B)
    assert not made.is_verified(B)
    assert not made.takes_streams(B)
    assert B not in made._table
    made.on_relayed(heartbeat(B, step=5), Contact(B, THERE), A, 2.0)
    assert (peer.step, peer.last_heard) == (5, 2.0)


def test_its_own_proven_response_makes_it_a_contact() -> None:
    """One without a proof does not."""
    made = member_list()
    insert(made, A)
    made.on_relayed(heartbeat(B), Contact(B, THERE), A, 1.0)

    made.on_response(heartbeat(B), THERE, 0.01, Contact(B, THERE), 2.0)
    assert not made.is_verified(B)
    made.on_response(heartbeat(B), THERE, 0.01, Contact(B, THERE), 3.0, proven=True)
    assert made.is_verified(B)
    assert made.helper(B) is None
    assert made.takes_streams(B)
    assert B in made._table


def test_a_member_that_stopped_answering_keeps_its_place_and_others_ask_for_it() -> None:
    """A hole that opens later: it stays verified. No other node is asked through it, and it tells nobody of others."""
    made = member_list()
    for node_id, address in ((A, HERE), (B, THERE), (C, Address("10.0.0.3", 8468))):
        insert(made, node_id, address)
    made.on_relayed(heartbeat(B, step=7), Contact(B, THERE), A, 1.0)

    assert (made.helper(B), made.is_verified(B)) == (made.contact(A), True)
    assert made.heard_directly(B, 0.0) is None
    assert made.heard_directly(A, 0.0) is not None
    assert made.heard_directly(A, 1.0) is None
    [request] = made.on_timeout(Contact(C, Address("10.0.0.3", 8468)), 2.0)
    assert request == SendPingRequest(C, (A,))
    made.on_response(heartbeat(B, step=7), THERE, 0.01, Contact(B, THERE), 3.0)
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
    made = member_list()
    insert(made, A)
    insert(made, B, THERE, step=9, **known)

    assert made.on_relayed(heartbeat(B, step=3, **relayed), Contact(B, THERE), A, 1.0) == ()
    peer = made.peer(B)
    assert peer is not None
    assert (peer.step, made.helper(B)) == (9, None)


def test_a_relayed_node_takes_nobodys_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the own id, not the address of another, not for a node that leaves, and not in a full view."""
    made = member_list()
    insert(made, A)

    assert made.on_relayed(heartbeat(OWN), Contact(OWN, THERE), A, 1.0) == ()
    assert made.on_relayed(heartbeat(C), Contact(B, THERE), A, 1.0) == ()
    assert made.on_relayed(heartbeat(B), Contact(B, HERE), A, 1.0) == ()
    assert made.on_relayed(heartbeat(B, activity=int(Activity.LEAVING)), Contact(B, THERE), A, 1.0) == ()
    monkeypatch.setattr(members, "FULL_VIEW", 1)
    assert made.on_relayed(heartbeat(B), Contact(B, THERE), A, 1.0) == ()


def test_a_relayed_leave_removes_a_member() -> None:
    """As its own message would."""
    made = member_list()
    insert(made, A)
    made.on_relayed(heartbeat(B), Contact(B, THERE), A, 1.0)

    leaving = heartbeat(B, activity=int(Activity.LEAVING))
    assert changes(made.on_relayed(leaving, Contact(B, THERE), A, 2.0)) == [(B, "left")]
    assert made.helper(B) is None
    assert made.is_verified(B)


def test_a_contact_that_timed_out_has_a_growing_pause_until_it_answers() -> None:
    """By id and address; twice as long each time; an answer ends it."""
    cache = NegativeCache()
    one = contact(b"a" * 20)
    cache.add(one, 0.0)
    assert cache.is_silent(one, 4.9)
    assert not cache.is_silent(one, 5.1)
    assert not cache.is_silent(contact(b"a" * 20, port=1), 1.0)
    cache.add(one, 6.0)
    assert cache.is_silent(one, 15.9)
    cache.discard(one)
    assert not cache.is_silent(one, 7.0)


def test_the_pause_and_the_cache_are_bounded() -> None:
    """No pause is longer than the maximum, and the oldest contact is dropped from a full cache."""
    cache = NegativeCache()
    one = contact(b"a" * 20)
    for _ in range(20):
        cache.add(one, 0.0)
    assert not cache.is_silent(one, MAX_PAUSE_S + 0.1)
    for port in range(1, MAX_ENTRIES + 1):
        cache.add(contact(b"b" * 20, port), 0.0)

    assert len(cache) == MAX_ENTRIES
    assert not cache.is_silent(one, 1.0)


def test_an_address_that_nobody_tries_again_is_forgotten() -> None:
    """Once its pause has been over for as long as the longest; until then the next pause is twice as long."""
    cache = NegativeCache()
    one = contact(b"a" * 20)
    cache.add(one, 0.0)
    cache.expire(5.0 + MAX_PAUSE_S)
    cache.add(one, 5.0 + MAX_PAUSE_S)
    assert cache.is_silent(one, 14.9 + MAX_PAUSE_S)
    cache.expire(15.1 + 2 * MAX_PAUSE_S)
    assert len(cache) == 0
