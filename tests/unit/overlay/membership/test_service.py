"""The member list at work: what it sends, logs and notifies, its timer, and its questions to single peers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from unittest import mock

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.kademlia.messages import (
    Gossip,
    GossipOnly,
    MemberState,
    Nodes,
    Ping,
    PingRequest,
    PingResult,
    Pong,
    StreamsFailing,
    pack_contact,
)
from p2pnode.overlay.membership import failure_detector
from p2pnode.overlay.membership.service import BROADCAST_MAX_PEERS, DEATHS_AT_ONCE, REDIAL_DEAD_S, STREAM_FAILURE_S
from p2pnode.overlay.peers import Contact, PeerChange
from tests.harness.builders.peers import heartbeat, ids
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import in_world, played_by, run_by
from tests.harness.stubs.recording_protocol import OWN, MembershipWorld
from tests.harness.stubs.stream_stub import StreamStub

A, B, C, D = ids(4)
HERE = Address("10.0.0.1", 8468)
NEWS = Gossip(1, A, 1)
PEER = Contact(A, HERE)


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
    world.membership.broadcast(NEWS, at_once=True)
    assert {contact.node_id for contact, _, _ in world.recorder.sent} == {A, B, C}
    world.recorder.sent.clear()
    for number, node_id in enumerate(ids(60, seed=2)):
        home = Contact(node_id, Address("10.1.0.1", 1 + number))
        world.answered(heartbeat(node_id, port=1 + number), home)
    world.membership.send_to_some([NEWS])
    assert len({contact for contact, _, _ in world.recorder.sent}) == BROADCAST_MAX_PEERS


@played_by(in_world, World)
def test_when_many_die_only_some_deaths_are_sent_at_once(world: World) -> None:
    """The others ride on other datagrams."""
    deaths = [Gossip(MemberState.DEAD, node_id, 1) for node_id in ids(100, seed=3)]
    for news in deaths:
        world.membership.broadcast(news, at_once=True)
    burst = int(DEATHS_AT_ONCE.burst)
    assert [news for _, [news], _ in world.recorder.sent[::3]] == deaths[:burst]
    assert len(world.recorder.sent) == 3 * burst
    assert len(world.recorder.queue) == len(deaths)


@played_by(in_world, World)
def test_a_state_change_is_applied_logged_and_notified(world: World) -> None:
    """A death goes to the log at info level, a suspicion at debug level; a death's gossip still finds its contact."""
    world.members.on_unreachable(A)
    world.members.detector.declare_dead(A, world.clock.monotonic(), "silent")
    world.recorder.sent.clear()
    world.membership.tell(A, NEWS)
    assert world.changes == [(A, "suspect"), (A, "dead")]
    assert [(record.level, record.event) for record in world.records] == [
        ("debug", "peer_suspect"),
        ("info", "peer_dead"),
    ]
    assert world.recorder.sent == [(world.homes[A], [NEWS], GossipOnly())]
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
    for _ in range(2):
        world.membership.verify(stranger)
    world.membership.verify(Contact(OWN, HERE), counts_as_failure=False)
    first, second = world.recorder.calls
    assert first.options == {"counts_as_failure": True, "require_proof": True}
    assert second.options == {"counts_as_failure": False, "require_proof": True}


@played_by(in_world, World)
def test_an_unanswered_address_check_moves_the_peer(world: World) -> None:
    """An answer leaves it where it is."""
    there = Contact(A, Address("10.0.0.99", 8468))
    for _ in range(2):
        world.answered(heartbeat(A), there)
    assert [call.contact for call in world.recorder.calls] == [world.homes[A]] * 2
    world.recorder.calls[0].on_result(Pong())
    assert world.members.contact(A) == world.homes[A]
    world.recorder.calls[1].on_result(None)
    assert world.members.contact(A) == there
    assert world.changes == [(A, "moved")]


@played_by(in_world, World)
def test_late_answers_to_an_inquiry_do_not_count_in_the_next(world: World) -> None:
    """Two helpers of one that another has ended are silent; the next still waits for its own."""
    world.membership.probe_through(A, (B, C))
    _, late = world.recorder.calls
    world.recorder.calls[0].on_result(PingResult(True))
    world.membership.probe_through(A, (B, C))

    late.on_result(None)
    world.recorder.calls[2].on_result(PingResult(False))
    assert world.changes == []
    world.recorder.calls[3].on_result(None)
    assert world.changes == [(A, "suspect")]


@run_by(run)
async def test_a_member_that_sends_something_during_an_inquiry_is_not_suspected() -> None:
    """Helpers that do not reach it say nothing of a member that this node hears."""
    world = World()
    world.membership.probe_through(A, (B,))
    await asyncio.sleep(0.3)
    world.members.on_request(heartbeat(A), world.homes[A].address)
    world.recorder.calls[-1].on_result(None)
    assert world.changes == []

    world.membership.probe_through(A, (B,))
    await asyncio.sleep(0.3)
    world.recorder.calls[-1].on_result(None)
    assert world.changes == [(A, "suspect")]


@played_by(in_world, World)
def test_a_peer_whose_streams_move_is_slow_and_not_silent(world: World) -> None:
    """An unanswered ping starts no inquiry while bytes move, and ends a suspicion; without movement it does as ever."""
    stream = StreamStub()
    world.members.movement.add(A, stream)
    world.membership.probe(A)
    stream.bytes = 10
    world.recorder.calls.clear()
    world.members.on_timeout(world.homes[A])
    assert world.recorder.calls == []
    world.members.on_timeout(world.homes[A])  # nothing has moved since
    assert {type(call.body) for call in world.recorder.calls} == {PingRequest}
    for call in list(world.recorder.calls):
        call.on_result(None)
    assert world.changes == [(A, "suspect")]
    stream.bytes = 20
    world.members.on_timeout(world.homes[A])
    assert world.changes == [(A, "suspect"), (A, "refuted")]


@played_by(in_world, World)
def test_what_moved_before_a_ping_does_not_answer_it(world: World) -> None:
    """Bytes count from the ping on, and streams of a dead peer are forgotten."""
    stream = StreamStub()
    world.members.movement.add(A, stream)
    stream.bytes = 10
    world.membership.probe(A)
    world.recorder.calls.clear()
    world.members.on_timeout(world.homes[A])
    assert {type(call.body) for call in world.recorder.calls} == {PingRequest}
    world.members.on_gossip(Gossip(3, A, 1), A)
    stream.bytes = 20
    assert not world.members.movement.has_moved(A)


def relayed(world: World) -> Contact:
    """C hears D, which does not answer this node."""
    stranger = Contact(D, Address("10.0.0.4", 8468))
    world.membership.verify(stranger, named_by=world.homes[C])
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
    world.members.on_timeout(stranger)
    world.membership.verify(stranger, named_by=world.homes[C])
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
    world.answered(restarted, world.homes[A])
    assert world.membership.is_reachable(A)


# -- the timer


class Alone(MembershipWorld):
    """One peer is known, and answers nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[tuple[str, float]] = []
        self.membership.on_change(lambda change: self.changes.append((change.kind, self.clock.monotonic())))
        self.answered(heartbeat(PEER.node_id), PEER)

    async def leave_unanswered(self, seconds: float) -> None:
        """Each call of this time is given up a fifth of a second later."""
        loop, given_up = asyncio.get_running_loop(), len(self.recorder.calls)
        for _ in range(round(10 * seconds)):
            await asyncio.sleep(0.1)
            for call in self.recorder.calls[given_up:]:
                loop.call_later(0.1, self.members.on_timeout, call.contact)
            given_up = len(self.recorder.calls)


def play(
    story: Callable[[Alone], Awaitable[None]],
    *,
    probe_interval_s: float = failure_detector.PROBE_INTERVAL_S,
    suspicion_s: float = failure_detector.SUSPICION_S,
) -> None:
    async def probing() -> None:
        world = Alone()
        world.membership.start()
        await story(world)
        world.membership.close()
        sent = len(world.recorder.calls)
        await asyncio.sleep(30)
        assert len(world.recorder.calls) == sent, "a stopped prober sends nothing"

    with mock.patch.multiple(failure_detector, PROBE_INTERVAL_S=probe_interval_s, SUSPICION_S=suspicion_s):
        run(probing())


@played_by(play, probe_interval_s=10.0, suspicion_s=1.0)
async def test_a_suspicion_shorter_than_a_round_ends_on_time(world: Alone) -> None:
    """With ten seconds between rounds and one of suspicion the death comes after twice the suspicion and three probes
    of half a second, not after three rounds."""
    next_round = world.members.detector.next_deadline()
    await asyncio.sleep(next_round - world.clock.monotonic() + 0.1)
    world.members.on_unreachable(PEER.node_id)
    await world.leave_unanswered(5)
    assert [kind for kind, _ in world.changes] == ["up", "suspect", "dead"]
    assert world.changes[2][1] - world.changes[1][1] == pytest.approx(2.0 + 3 * 0.5, abs=0.3)


@played_by(play, probe_interval_s=10.0, suspicion_s=1.0)
async def test_the_timer_is_armed_for_the_deadline_that_the_detector_measures_lag_from(world: Alone) -> None:
    """A suspicion that ended, and a later one, move both: a tick that comes late is noticed as lag of this loop."""
    next_round = world.members.detector.next_deadline()
    await asyncio.sleep(next_round - world.clock.monotonic() + 0.1)
    for _ in range(2):
        world.members.on_unreachable(PEER.node_id)
        assert world.membership._timer is not None
        planned = world.members.detector._planned
        assert world.membership._timer.when() == pytest.approx(planned)
        world.answered(heartbeat(PEER.node_id), PEER)
        await asyncio.sleep(0.3)


@played_by(play)
async def test_a_dead_member_is_called_now_and_then(world: Alone) -> None:
    """So the sides of a healed partition find each other; a time-out there is no failure."""
    world.members.detector.declare_dead(PEER.node_id, world.clock.monotonic(), "certain")
    await asyncio.sleep(4 * REDIAL_DEAD_S)
    assert 3 <= len(world.recorder.calls) <= 4
    assert {(call.contact, call.options["counts_as_failure"]) for call in world.recorder.calls} == {(PEER, False)}


@played_by(play)
async def test_a_subscriber_that_raises_does_not_end_the_probing(world: Alone) -> None:
    """The tick fails, and the next one comes."""

    def broken(change: PeerChange) -> None:
        if change.kind == "dead":
            raise LookupError("a bug")

    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    world.membership.on_change(broken)
    world.members.on_unreachable(PEER.node_id)
    await world.leave_unanswered(8)
    assert len(failures) == 1
    before = len(world.recorder.calls)
    await asyncio.sleep(2 * REDIAL_DEAD_S)
    assert len(world.recorder.calls) > before


# -- questions to single peers


@played_by(in_world, World)
async def test_a_ping_returns_the_heartbeat_of_the_peer(world: World) -> None:
    """As the table has it after the response."""
    world.answered(heartbeat(A, step=4, samples=2, step_seconds=1.5, eligible=True), world.homes[A])
    asked = asyncio.create_task(world.membership.ping(world.homes[A]))
    await asyncio.sleep(0)
    world.recorder.calls[0].on_result(Pong())
    found = await asked
    assert found is not None
    assert (found.node_id, found.step, found.samples, found.eligible) == (A, 4, 2, True)


@pytest.mark.parametrize("result", [None, Nodes(b"", b"")])
@played_by(in_world, World)
async def test_a_ping_without_a_pong_returns_none(world: World, *, result: Nodes | None) -> None:
    """After a time-out, and after another kind of response."""
    asked = asyncio.create_task(world.membership.ping(world.homes[A]))
    await asyncio.sleep(0)
    world.recorder.calls[0].on_result(result)
    assert await asked is None


@played_by(in_world, World)
async def test_steps_are_queried_at_once_and_all_results_awaited(world: World) -> None:
    """Unknown ids are skipped; without a known one nothing is awaited."""
    asked = asyncio.create_task(world.membership.query_steps([A, b"x" * 20, B]))
    await asyncio.sleep(0)
    assert [(call.contact.node_id, call.body) for call in world.recorder.calls] == [(A, Ping()), (B, Ping())]
    world.recorder.calls[0].on_result(Pong())
    await asyncio.sleep(0)
    assert not asked.done()
    world.recorder.calls[1].on_result(None)
    await asked
    await world.membership.query_steps([b"x" * 20])


@played_by(in_world, World)
async def test_a_member_that_does_not_answer_is_asked_for_at_another(world: World) -> None:
    """Its step arrives as if it had answered itself."""
    world.members.on_relayed(heartbeat(B), world.homes[B], A)
    asked = asyncio.create_task(world.membership.query_steps([B]))
    await asyncio.sleep(0)
    [call] = world.recorder.calls
    assert (call.contact, call.body) == (world.homes[A], PingRequest(pack_contact(world.homes[B])))
    call.on_result(PingResult(True, heartbeat(B, step=8)))
    await asked
    peer = world.members.peer(B)
    assert peer is not None
    assert peer.step == 8


@played_by(in_world, World)
async def test_a_cancelled_caller_leaves_a_result_without_effect(world: World) -> None:
    """The result that arrives later raises nothing."""
    for query in (world.membership.ping(world.homes[A]), world.membership.query_steps([A])):
        asked = asyncio.ensure_future(query)
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    for call in world.recorder.calls:
        call.on_result(Pong())
