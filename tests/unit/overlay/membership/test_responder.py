"""What a node answers to datagram requests."""

from __future__ import annotations

import asyncio

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.kademlia.messages import (
    PingRequest,
    PingResult,
    Pong,
    Result,
    pack_contact,
)
from p2pnode.overlay.membership.responder import Responder
from p2pnode.overlay.peers import Contact
from tests.harness.builders.peers import contact, heartbeat
from tests.harness.runner.stories import in_world, played_by
from tests.harness.stubs.recording_protocol import MembershipWorld
from tests.harness.stubs.stream_stub import StreamStub

ASKER, TARGET, HERE = heartbeat(b"q" * 20), contact(b"t" * 20, 9), Address("10.0.0.7", 8468)


class World(MembershipWorld):
    """With a responder."""

    def __init__(self) -> None:
        super().__init__()
        self.responder = Responder(self.membership, self.recorder.protocol)

    def answer(self, body: object, message_id: bytes = b"m" * 20) -> Result | None:
        return self.recorder.procedures[type(body)](body, ASKER, HERE, message_id)


@pytest.mark.parametrize(("result", "answered"), [(Pong(), True), (None, False)])
@played_by(in_world, World)
def test_a_ping_on_behalf_of_another_node_is_answered_when_it_has_ended(
    world: World, *, result: Result | None, answered: bool
) -> None:
    """Its time-out does not count as a failure of the target."""
    assert world.answer(PingRequest(pack_contact(TARGET))) is None
    [call] = world.recorder.calls
    assert (call.contact, call.options) == (TARGET, {"counts_as_failure": False})
    assert world.recorder.responses == []
    call.on_result(result)
    assert world.recorder.responses == [(b"m" * 20, HERE, PingResult(answered))]


@played_by(in_world, World)
async def test_a_target_known_at_another_address_is_pinged_at_both(world: World) -> None:
    """Behind a NAT the address differs per peer: the first answer counts, and is sent once."""
    known = Contact(TARGET.node_id, Address("10.0.0.44", 9))
    world.answered(heartbeat(TARGET.node_id, port=9), known)
    await asyncio.sleep(1)
    world.answer(PingRequest(pack_contact(TARGET)))
    first, second = world.recorder.calls
    assert {first.contact, second.contact} == {TARGET, known}
    second.on_result(Pong())
    first.on_result(None)
    seen = heartbeat(TARGET.node_id, port=9, host=known.address.host)
    assert [result for _, _, result in world.recorder.responses] == [PingResult(True, seen)]


@played_by(in_world, World)
def test_an_address_that_cannot_be_sent_to_is_not_pinged_for_another(world: World) -> None:
    """It is counted."""
    world.answer(PingRequest(b"i" * 20 + bytes(6)))
    assert world.recorder.calls == []
    assert world.recorder.counters == {"malformed_contacts": 1}


@played_by(in_world, World)
def test_a_peer_that_moves_bytes_answers_a_probe_for_another(world: World) -> None:
    """Its pong is late, but the streams with it moved since: it is there. One that moves nothing is not."""
    stream = StreamStub()
    movement = world.members.movement
    movement.add(TARGET.node_id, stream)
    for moved, is_there in ((5, True), (0, False)):
        world.answer(PingRequest(pack_contact(TARGET)))
        stream.bytes += moved
        world.recorder.calls.pop().on_result(None)
        assert world.recorder.responses.pop()[2] == PingResult(is_there)
