"""Failed streams: reported to the peer, probed, and excluded from candidates for a while."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.kademlia.messages import Ping, StreamsFailing
from p2pnode.overlay.membership.failure_detector import FailureDetector
from p2pnode.overlay.membership.members import MemberList
from p2pnode.overlay.membership.service import STREAM_FAILURE_S, Membership
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.settings import LivenessSettings
from tests.harness.builders.peers import heartbeat, ids
from tests.harness.environment.simulated import make_environment
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.runner.stories import played_by
from tests.harness.stubs.recording_protocol import OWN, RecordingProtocol

PEER = Contact(ids(1)[0], Address("10.0.0.1", 8468))


class World:
    """The health of streams over a protocol that records; one peer is known."""

    def __init__(self) -> None:
        self.recorder = RecordingProtocol()
        detector = FailureDetector(OWN, 1, LivenessSettings(), random.Random(1), 0.0)
        self.members = MemberList(OWN, 7, detector, self.recorder.router, 20)
        environment = make_environment()
        self.health = Membership(self.members, self.recorder.protocol, LivenessSettings(), environment)
        self.health.on_response(heartbeat(PEER.node_id), PEER.address, 0.01, PEER, proven=True)


def play(story: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        await story(World())

    VirtualLoop().run(run())


@played_by(play)
async def test_the_second_failure_is_reported_to_the_peer_and_excludes_it_for_a_while(world: World) -> None:
    """Each failure requests a probe; after the time it is reachable again."""
    world.health.on_stream_failure(PEER, "reset")
    assert world.health.is_reachable(PEER.node_id)
    assert [(call.contact, call.body) for call in world.recorder.calls] == [(PEER, Ping())]
    assert world.recorder.sent == []
    world.health.on_stream_failure(PEER, "reset")
    assert not world.health.is_reachable(PEER.node_id)
    assert world.recorder.sent == [(PEER, [], StreamsFailing())]
    await asyncio.sleep(STREAM_FAILURE_S + 1)
    assert world.health.is_reachable(PEER.node_id)


@played_by(play)
async def test_failures_far_apart_are_counted_anew(world: World) -> None:
    """Two failures that are not within the time do not exclude it."""
    world.health.on_stream_failure(PEER, "timeout")
    await asyncio.sleep(STREAM_FAILURE_S + 1)
    world.health.on_stream_failure(PEER, "timeout")
    assert world.health.is_reachable(PEER.node_id)


@played_by(play)
async def test_a_response_and_a_restart_reset_the_count(world: World) -> None:
    """A stream that works, or a new start, makes it reachable at once."""
    for _ in range(2):
        world.health.on_stream_failure(PEER, "reset")
    world.health.on_stream_response(heartbeat(PEER.node_id), PEER.address)
    assert world.health.is_reachable(PEER.node_id)
    for _ in range(2):
        world.health.on_stream_failure(PEER, "reset")
    restarted = heartbeat(PEER.node_id, incarnation=2, boot_id=8)
    world.recorder.events.on_response(restarted, PEER.address, 0.01, PEER, proven=True)  # type: ignore[attr-defined]
    assert world.health.is_reachable(PEER.node_id)


@played_by(play)
async def test_a_request_refreshes_a_known_peer(world: World) -> None:
    """Its heartbeat over a stream is as good as one in a datagram."""
    world.health.on_stream_request(heartbeat(PEER.node_id, step=3), Address(PEER.address.host, 50123))
    peer = world.members.peer(PEER.node_id)
    assert peer is not None
    assert peer.step == 3
