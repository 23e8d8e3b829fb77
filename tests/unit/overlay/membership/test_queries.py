"""Queries to single peers as coroutines."""

from __future__ import annotations

import asyncio

import pytest

from p2pnode.overlay.kademlia.messages import Nodes, Ping, PingRequest, PingResult, Pong, pack_contact
from tests.harness.builders.peers import contact, heartbeat, ids
from tests.harness.runner.stories import in_world, played_by
from tests.harness.stubs.recording_protocol import MembershipWorld

A, B = ids(2)


class World(MembershipWorld):
    """A and B are known."""

    def __init__(self) -> None:
        super().__init__()
        self.answered(heartbeat(A, step=4, samples=2, step_seconds=1.5, eligible=True), contact(A))
        self.answered(heartbeat(B, port=9), contact(B, 9))


@played_by(in_world, World)
async def test_a_ping_returns_the_heartbeat_of_the_peer(world: World) -> None:
    """As the table has it after the response."""
    asked = asyncio.create_task(world.membership.ping(contact(A)))
    await asyncio.sleep(0)
    world.recorder.calls[0].on_result(Pong())
    found = await asked
    assert found is not None
    assert (found.node_id, found.step, found.samples, found.eligible) == (A, 4, 2, True)


@pytest.mark.parametrize("result", [None, Nodes(b"", b"")])
@played_by(in_world, World)
async def test_a_ping_without_a_pong_returns_none(world: World, *, result: Nodes | None) -> None:
    """After a time-out, and after another kind of response."""
    asked = asyncio.create_task(world.membership.ping(contact(A)))
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
    world.members.on_relayed(heartbeat(B, port=9), contact(B, 9), A, 0.0)
    asked = asyncio.create_task(world.membership.query_steps([B]))
    await asyncio.sleep(0)
    [call] = world.recorder.calls
    assert (call.contact, call.body) == (contact(A), PingRequest(pack_contact(contact(B, 9))))
    call.on_result(PingResult(True, heartbeat(B, port=9, step=8)))
    await asked
    peer = world.members.peer(B)
    assert peer is not None
    assert peer.step == 8


@played_by(in_world, World)
async def test_a_cancelled_caller_leaves_a_result_without_effect(world: World) -> None:
    """The result that arrives later raises nothing."""
    for query in (world.membership.ping(contact(A)), world.membership.query_steps([A])):
        asked = asyncio.ensure_future(query)
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    for call in world.recorder.calls:
        call.on_result(Pong())
