"""Calls between scripts through their daemons, over the real overlay on a simulated network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from p2pnode.overlay.peers import Activity
from p2pnode.overlay.transport import PART_BYTES
from p2pnode.training.engines import calls
from p2pnode.training.engines.calls import ScriptCalls
from p2pnode.training.trainer_link.engine_messages import CallAnswered, CallReceived, MembersFound, NotAnswered
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.swarms.overlay_swarm import OverlayWorld


async def pair(answer: Callable[[CallReceived], bytes | None]) -> tuple[OverlayWorld, ScriptCalls, ScriptCalls]:
    """The calls of a server, node 0, whose script answers with `answer`, and of a worker."""
    world = OverlayWorld(1)
    server_overlay, worker_overlay = await world.raise_swarm(2)
    worker_overlay.set_willing(False)
    await asyncio.sleep(2.0)  # they know each other

    def to_script(call: CallReceived) -> None:
        found = answer(call)
        if found is not None:
            asyncio.get_running_loop().call_later(0.1, server.on_answer, CallAnswered(call.number, found))

    server = ScriptCalls(server_overlay, to_script, is_server=True)
    return world, server, ScriptCalls(worker_overlay, lambda call: None, is_server=False)


@run_by(run)
async def test_a_call_is_answered_by_the_other_script() -> None:
    """The payload comes whole, in parts of a megabyte, with its sender; so does the answer."""
    seen = []
    world, _, worker = await pair(lambda call: (seen.append(call.sender), call.payload[::-1])[1])
    found = await worker.call(world.nodes[0].node_id, b"ab" + b"x" * (PART_BYTES + 3))
    assert seen == [world.nodes[1].node_id]
    assert found == b"x" * (PART_BYTES + 3) + b"ba"


@run_by(run)
async def test_a_dead_server_ends_the_wait() -> None:
    """As soon as it is declared dead; nobody waits for its answer."""
    world, _, worker = await pair(lambda call: None)
    calling = asyncio.create_task(worker.call(world.nodes[0].node_id, b""))
    await asyncio.sleep(3.0)
    await world.kill(0)
    async with asyncio.timeout(10.0):
        with pytest.raises(NotAnswered, match="is gone"):
            await calling


@run_by(run)
async def test_a_script_that_has_ended_answers_nobody() -> None:
    """Calls that wait are refused, and later ones too."""
    world, server, worker = await pair(lambda call: None)
    asyncio.get_running_loop().call_later(1.0, server.end)
    for _ in range(2):
        with pytest.raises(NotAnswered, match="script"):
            await worker.call(world.nodes[0].node_id, b"")


@run_by(run)
async def test_a_node_that_is_no_server_refuses_calls() -> None:
    """And a node that nobody knows is not asked."""
    world, server, _ = await pair(lambda call: b"")
    with pytest.raises(NotAnswered, match="no server"):
        await server.call(world.nodes[1].node_id, b"")
    with pytest.raises(NotAnswered, match="not known"):
        await server.call(b"?" * 20, b"")


@run_by(run)
async def test_too_long_a_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before all of it is in memory."""
    monkeypatch.setattr(calls, "MAX_CALL_BYTES", 100)
    world, _, worker = await pair(lambda call: b"")
    with pytest.raises(NotAnswered, match="more than 100 bytes"):
        await worker.call(world.nodes[0].node_id, b"x" * 101)


@run_by(run)
async def test_servers_are_the_live_nodes_that_may_own_values() -> None:
    """In the order of their ids, this node included; one that leaves is none, and a dead one is gone."""
    world, server, worker = await pair(lambda call: b"")
    other, leaving, dead = [await world.join(number) for number in (2, 3, 4)]
    leaving.announce(activity=Activity.LEAVING)
    await asyncio.sleep(5.0)
    await world.kill(4)
    await asyncio.sleep(15.0)
    servers = sorted([world.nodes[0].node_id, other.node_id])
    assert worker.members([other.node_id, dead.node_id]) == MembersFound(servers, [dead.node_id])
    assert server.members([]).servers == servers


@run_by(run)
async def test_a_late_answer_is_dropped() -> None:
    """Its asker has gone."""
    _, server, _ = await pair(lambda call: b"")
    server.on_answer(CallAnswered(77, b""))
