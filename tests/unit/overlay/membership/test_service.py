"""The member list at work: what each action sends, logs and notifies."""

from __future__ import annotations

import asyncio

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.kademlia.messages import (
    Gossip,
    MemberState,
    Ping,
    PingRequest,
    PingResult,
    Pong,
    StreamsFailing,
    pack_contact,
)
from p2pnode.overlay.membership.actions import (
    AddressClaim,
    Broadcast,
    CheckAddress,
    SendNow,
    SendPing,
    SendPingRequest,
    StateChanged,
    Verify,
)
from p2pnode.overlay.membership.service import BROADCAST_MAX_PEERS, DEATHS_AT_ONCE, STREAM_FAILURE_S
from p2pnode.overlay.peers import Contact
from tests.harness.builders.peers import heartbeat, ids
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import in_world, played_by, run_by
from tests.harness.stubs.recording_protocol import OWN, MembershipWorld
from tests.harness.stubs.stream_stub import StreamStub

A, B, C, D = ids(4)
HERE = Address("10.0.0.1", 8468)
NEWS = Gossip(1, A, 1)


class World(MembershipWorld):
    """With the peers A, B and C."""

    def __init__(self) -> None:
        super().__init__()
        self.homes = {node_id: Contact(node_id, Address(f"10.0.0.{n}", 8468)) for n, node_id in enumerate((A, B, C), 1)}
        for node_id, home in self.homes.items():
            self.answered(heartbeat(node_id), home)
        self.changes: list[tuple[bytes, str]] = []
        self.membership.on_change(lambda change: self.changes.append((change.node_id, change.kind)))
        self.records.clear()


@played_by(in_world, World)
def test_a_broadcast_at_once_goes_to_a_sample_of_a_large_swarm(world: World) -> None:
    """To all of a small one; to `BROADCAST_MAX_PEERS` different ones of many."""
    world.membership.perform([Broadcast(NEWS, at_once=True)])
    assert {contact.node_id for contact, _, _ in world.recorder.sent} == {A, B, C}
    world.recorder.sent.clear()
    for number, node_id in enumerate(ids(60, seed=2)):
        home = Contact(node_id, Address("10.1.0.1", 1 + number))
        world.membership.on_response(heartbeat(node_id, port=1 + number), home.address, 0.01, home, proven=True)
    world.membership.send_to_some([NEWS])
    assert len({contact for contact, _, _ in world.recorder.sent}) == BROADCAST_MAX_PEERS


@played_by(in_world, World)
def test_when_many_die_only_some_deaths_are_sent_at_once(world: World) -> None:
    """The others ride on other datagrams."""
    deaths = [Gossip(MemberState.DEAD, node_id, 1) for node_id in ids(100, seed=3)]
    world.membership.perform([Broadcast(news, at_once=True) for news in deaths])
    burst = int(DEATHS_AT_ONCE.burst)
    assert [news for _, [news], _ in world.recorder.sent[::3]] == deaths[:burst]
    assert len(world.recorder.sent) == 3 * burst
    assert len(world.recorder.queue) == len(deaths)


@played_by(in_world, World)
def test_a_state_change_is_applied_logged_and_notified(world: World) -> None:
    """A death goes to the log at info level, a suspicion at debug level; a death's gossip still finds its contact."""
    world.membership.perform([StateChanged(A, "suspect", "silent"), StateChanged(A, "dead", "silent")])
    world.membership.perform([SendNow(A, NEWS)])
    assert world.changes == [(A, "suspect"), (A, "dead")]
    assert [(record.level, record.event) for record in world.records] == [
        ("debug", "peer_suspect"),
        ("info", "peer_dead"),
    ]
    assert world.recorder.sent[0][0] == world.homes[A]
    assert world.members.peer(A) is None


@played_by(in_world, World)
def test_a_node_that_is_being_asked_for_a_proof_is_not_asked_for_another(world: World) -> None:
    """It asks in return before its answer has come; at another address it has to prove its id there."""
    stranger = Contact(b"s" * 20, Address("10.0.0.9", 8468))
    elsewhere = Contact(stranger.node_id, Address("10.0.0.8", 8468))
    world.recorder.proving.add(stranger)
    world.membership.verify(stranger)
    assert world.recorder.calls == []
    world.membership.verify(elsewhere)
    assert [call.contact for call in world.recorder.calls] == [elsewhere]
    world.recorder.proving.clear()
    world.membership.verify(stranger)
    assert [call.contact for call in world.recorder.calls] == [elsewhere, stranger]


@played_by(in_world, World)
def test_a_verification_requires_a_proof_and_is_limited(world: World) -> None:
    """One ping per contact and pause."""
    stranger = Contact(b"s" * 20, HERE)
    world.membership.verify(stranger)
    world.membership.perform([Verify(stranger), Verify(Contact(OWN, HERE), counts_as_failure=False)])
    first, second = world.recorder.calls
    assert first.options == {"counts_as_failure": True, "require_proof": True}
    assert second.options == {"counts_as_failure": False, "require_proof": True}


@played_by(in_world, World)
def test_an_unanswered_address_check_moves_the_peer(world: World) -> None:
    """An answer leaves it where it is."""
    there = Address("10.0.0.99", 8468)
    check = CheckAddress(world.homes[A], AddressClaim(heartbeat(A), there, 0.01, known=True))
    world.membership.perform([check, check])
    world.recorder.calls[0].on_result(Pong())
    assert world.members.contact(A) == world.homes[A]
    world.recorder.calls[1].on_result(None)
    assert world.members.contact(A) == Contact(A, there)
    assert world.changes == [(A, "moved")]


@played_by(in_world, World)
def test_late_answers_to_an_inquiry_do_not_count_in_the_next(world: World) -> None:
    """Two helpers of one that another has ended are silent; the next still waits for its own."""
    world.membership.perform([SendPingRequest(A, (B, C))])
    _, late = world.recorder.calls
    world.recorder.calls[0].on_result(PingResult(True))
    world.membership.perform([SendPingRequest(A, (B, C))])

    late.on_result(None)
    world.recorder.calls[2].on_result(PingResult(False))
    assert world.changes == []
    world.recorder.calls[3].on_result(None)
    assert world.changes == [(A, "suspect")]


@run_by(run)
async def test_a_member_that_sends_something_during_an_inquiry_is_not_suspected() -> None:
    """Helpers that do not reach it say nothing of a member that this node hears."""
    world = World()
    world.membership.perform([SendPingRequest(A, (B,))])
    await asyncio.sleep(0.3)
    world.membership.on_request(heartbeat(A), world.homes[A].address)
    world.recorder.calls[-1].on_result(None)
    assert world.changes == []

    world.membership.perform([SendPingRequest(A, (B,))])
    await asyncio.sleep(0.3)
    world.recorder.calls[-1].on_result(None)
    assert world.changes == [(A, "suspect")]


@played_by(in_world, World)
def test_a_peer_whose_streams_move_is_slow_and_not_silent(world: World) -> None:
    """An unanswered ping starts no inquiry while bytes move, and ends a suspicion; without movement it does as ever."""
    stream = StreamStub()
    world.membership.movement.add(A, stream)
    world.membership.perform([SendPing(A)])
    stream.bytes = 10
    world.recorder.calls.clear()
    world.membership.on_timeout(world.homes[A])
    assert world.recorder.calls == []
    world.membership.on_timeout(world.homes[A])  # nothing has moved since
    assert {type(call.body) for call in world.recorder.calls} == {PingRequest}
    for call in list(world.recorder.calls):
        call.on_result(None)
    assert world.changes == [(A, "suspect")]
    stream.bytes = 20
    world.membership.on_timeout(world.homes[A])
    assert world.changes == [(A, "suspect"), (A, "refuted")]


@played_by(in_world, World)
def test_what_moved_before_a_ping_does_not_answer_it(world: World) -> None:
    """Bytes count from the ping on, and streams of a dead peer are forgotten."""
    stream = StreamStub()
    world.membership.movement.add(A, stream)
    stream.bytes = 10
    world.membership.perform([SendPing(A)])
    world.recorder.calls.clear()
    world.membership.on_timeout(world.homes[A])
    assert {type(call.body) for call in world.recorder.calls} == {PingRequest}
    world.membership.on_gossip(Gossip(3, A, 1), A)
    stream.bytes = 20
    assert not world.membership.movement.has_moved(A)


def relayed(world: World) -> Contact:
    """C hears D, which does not answer this node."""
    stranger = Contact(D, Address("10.0.0.4", 8468))
    world.membership.verify(stranger, world.homes[C])
    [ping] = world.recorder.calls
    assert (ping.contact, ping.body, ping.options["require_proof"]) == (stranger, Ping(), True)
    ping.on_result(None)
    request = world.recorder.calls.pop()
    assert (request.contact, request.body) == (world.homes[C], PingRequest(pack_contact(stranger)))
    request.on_result(PingResult(True, heartbeat(D, step=3)))
    world.recorder.calls.clear()
    return stranger


@played_by(in_world, World)
def test_who_has_named_a_silent_node_is_asked_for_it(world: World) -> None:
    """Its heartbeat makes it a member."""
    relayed(world)
    assert world.changes == [(D, "up")]
    assert world.members.helper(D) == world.homes[C]


@played_by(in_world, World)
def test_a_node_known_to_be_silent_is_asked_for_at_once(world: World) -> None:
    """It is not pinged again before its pause is over. What nobody reaches is no member."""
    stranger = Contact(D, Address("10.0.0.4", 8468))
    world.membership.on_timeout(stranger)
    world.membership.verify(stranger, world.homes[C])
    [request] = world.recorder.calls
    assert request.contact == world.homes[C]
    request.on_result(PingResult(False))
    assert len(world.recorder.calls) == 1
    assert D not in world.members.peers


# -- failed streams


@played_by(in_world, World)
async def test_the_second_failure_is_reported_to_the_peer_and_excludes_it_for_a_while(world: World) -> None:
    """Each failure requests a probe; after the time it is reachable again."""
    world.membership.on_stream_failure(world.homes[A], "reset")
    assert world.membership.is_reachable(A)
    assert [(call.contact, call.body) for call in world.recorder.calls] == [(world.homes[A], Ping())]
    assert world.recorder.sent == []
    world.membership.on_stream_failure(world.homes[A], "reset")
    assert not world.membership.is_reachable(A)
    assert world.recorder.sent == [(world.homes[A], [], StreamsFailing())]
    await asyncio.sleep(STREAM_FAILURE_S + 1)
    assert world.membership.is_reachable(A)


@played_by(in_world, World)
async def test_failures_far_apart_are_counted_anew(world: World) -> None:
    """Two failures that are not within the time do not exclude it."""
    world.membership.on_stream_failure(world.homes[A], "timeout")
    await asyncio.sleep(STREAM_FAILURE_S + 1)
    world.membership.on_stream_failure(world.homes[A], "timeout")
    assert world.membership.is_reachable(A)


@played_by(in_world, World)
async def test_a_response_and_a_restart_reset_the_count(world: World) -> None:
    """A stream that works, or a new start, makes it reachable at once."""
    for _ in range(2):
        world.membership.on_stream_failure(world.homes[A], "reset")
    world.membership.on_stream_response(heartbeat(A), world.homes[A].address)
    assert world.membership.is_reachable(A)
    for _ in range(2):
        world.membership.on_stream_failure(world.homes[A], "reset")
    restarted = heartbeat(A, incarnation=2, boot_id=8)
    world.recorder.events.on_response(restarted, world.homes[A].address, 0.01, world.homes[A], proven=True)  # type: ignore[attr-defined]
    assert world.membership.is_reachable(A)


@played_by(in_world, World)
async def test_a_request_refreshes_a_known_peer(world: World) -> None:
    """Its heartbeat over a stream is as good as one in a datagram."""
    world.membership.on_stream_request(heartbeat(A, step=3), Address(world.homes[A].address.host, 50123))
    peer = world.members.peer(A)
    assert peer is not None
    assert peer.step == 3
