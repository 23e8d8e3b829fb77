"""The composition: what a local change sends, what a failing service costs, and what leaving and stopping do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from p2pnode.overlay.kademlia.messages import MemberState
from p2pnode.overlay.overlay import Overlay
from p2pnode.overlay.peers import Activity, PeerChange
from p2pnode.overlay.transport import Response
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import played_by
from tests.harness.swarms.overlay_swarm import GENESIS, OverlayWorld, endpoint


def play(story: Callable[[OverlayWorld], Coroutine[Any, Any, None]], *, nodes: int = 2) -> None:
    async def body() -> None:
        world = OverlayWorld(seed=3)
        await world.raise_swarm(nodes)
        await world.until(lambda: all(len(node.peers) == nodes - 1 for node in world.nodes.values()), 5.0, "all known")
        await story(world)
        await world.stop()

    run(body())


def activity_at(node: Overlay, other: Overlay) -> Activity:
    peer = node.peers.get(other.node_id)
    assert peer is not None
    return peer.activity


@played_by(play)
async def test_a_founder_is_reachable_and_a_joiner_takes_its_genesis(world: OverlayWorld) -> None:
    """Both know each other by id, and name the genesis and address of the node."""
    first, second = world.nodes[0], world.nodes[1]
    assert first.genesis == second.genesis == GENESIS
    assert first.heartbeat.eligible
    assert [peer.node_id for peer in second.members()] == [first.node_id]
    assert second.contact(first.node_id) == first.local.contact
    assert (second.address, second.is_alive(first.node_id)) == (endpoint(1), True)
    assert (await second.lookup(first.node_id))[0] == first.local.contact
    assert first.report().peers == 1


@played_by(play)
async def test_a_change_of_role_reaches_peers_at_once_and_a_step_with_the_next_message(world: OverlayWorld) -> None:
    """Sampling and placement depend on the role; a step is no reason for a datagram."""
    first, second = world.nodes[0], world.nodes[1]
    await asyncio.sleep(2.0)
    sent = first._protocol.counters["datagrams_out"]
    first.announce(step=7)
    assert first._protocol.counters["datagrams_out"] == sent

    first.announce(activity=Activity.PAUSED)
    assert first._protocol.counters["datagrams_out"] > sent
    await asyncio.sleep(0.02)
    assert activity_at(second, first) is Activity.PAUSED
    first.set_willing(False)
    await asyncio.sleep(0.02)
    peer = second.peers.get(first.node_id)
    assert peer is not None
    assert not second.may_own(peer)


@played_by(play)
async def test_services_that_have_ended_are_forgotten(world: OverlayWorld) -> None:
    """The capacity is written by a task of its own whenever it changes, for as long as the node runs."""
    node = world.nodes[0]
    lasting = len(node._tasks)

    async def ends() -> None:
        await asyncio.sleep(0)

    for _ in range(20):
        node._run("capacity", ends)
        await asyncio.sleep(0.1)
    assert len(node._tasks) <= lasting + 1


@played_by(play)
async def test_a_failed_service_is_logged_and_begins_again(world: OverlayWorld) -> None:
    """The fault is counted; the node still answers."""
    first, second = world.nodes[0], world.nodes[1]

    begun = []

    async def fails() -> None:
        begun.append(None)
        if len(begun) == 1:
            raise RuntimeError("a bug")

    first._protocol.raise_handler_errors = False
    first._run("sampling", fails)
    await asyncio.sleep(2.0)

    assert len(begun) == 2
    (record,) = [record for record in world.records if record.event == "overlay_service_failed"]
    assert (record.level, record.fields) == ("error", {"service": "sampling", "error": "RuntimeError('a bug')"})
    assert first._protocol.counters["faults"] == 1
    assert await second.ping(first.local.contact) is not None


@played_by(play)
async def test_a_leave_is_sent_to_all_peers_and_the_transport_stays_open(world: OverlayWorld) -> None:
    """Peers remove the node without a suspicion; it still serves streams until it is stopped."""
    first, second = world.nodes[0], world.nodes[1]

    async def handler(*_: object) -> Response:
        return Response(b"still here")

    first.register("question", handler)
    home = first.local.contact
    sent = first._protocol.counters["datagrams_out"]
    await first.leave()
    assert first._protocol.counters["datagrams_out"] - sent >= 3, "the new role, and the leave twice"
    await asyncio.sleep(0.1)
    assert second.is_gone(first.node_id)
    kinds = [change.kind for _, change in world.changes[1] if change.node_id == first.node_id]
    assert kinds[-1] == "left"
    assert "suspect" not in kinds
    assert first._detector.leave_notice().kind == MemberState.LEFT
    async with second.request(home, "question", b"", timeout_s=5.0) as answer:
        assert answer.head == b"still here"


@played_by(play)
async def test_a_stopped_node_has_no_task_and_stop_may_be_called_twice(world: OverlayWorld) -> None:
    """The peers are on disk, so that the next start finds the swarm."""
    second = world.nodes.pop(1)
    tasks = list(second._tasks)
    assert tasks
    await second.stop()
    await second.stop()
    assert all(task.done() for task in tasks)
    assert await second.ping(world.nodes[0].local.contact) is None
    again = world.make(1)
    await again.start()
    assert again.remembered() == [str(endpoint(0))]


@played_by(play)
async def test_subscribers_are_called_when_a_peer_crashes(world: OverlayWorld) -> None:
    """Suspected first, dead within the detection bound, and counted in the report."""
    changes: list[PeerChange] = []
    first, second = world.nodes[0], world.nodes[1]
    first.on_change(changes.append)
    first.watch([second.node_id])
    await world.kill(1)
    await world.until(lambda: first.is_gone(second.node_id), 6.0, "the crash is detected")
    assert [change.kind for change in changes] == ["suspect", "dead"]
    assert first.report().lost == 1
