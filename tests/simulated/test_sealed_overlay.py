"""The closed swarm on a simulated network: the tests of the open one again, and those of the seal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.kademlia.messages import Gossip, MemberState
from p2pnode.overlay.peers import Activity, Heartbeat
from p2pnode.overlay.sealing.handshake import CLOCK_BOUND_S
from p2pnode.overlay.sealing.swarm_key import KeyRing, SwarmKey
from tests.harness.environment.simulated import VirtualClock
from tests.harness.environment.virtual_loop import run
from tests.harness.network.transport import MemoryTransport
from tests.harness.runner.stories import run_by
from tests.harness.swarms import overlay_swarm
from tests.harness.swarms.overlay_swarm import PORT, OverlayWorld, address_of
from tests.simulated import test_overlay_swarm as open_swarm

KEY, NEXT_KEY = SwarmKey(b"k" * 32), SwarmKey(b"n" * 32)
RING = KeyRing((KEY,))


@pytest.mark.parametrize(
    "story",
    [
        open_swarm.test_a_small_swarm_knows_everybody_exactly,
        open_swarm.test_a_failed_request_makes_liveness_look_at_once,
        open_swarm.test_a_leave_is_known_at_once,
        open_swarm.test_a_restarted_node_replaces_its_former_self,
        open_swarm.test_a_changed_address_is_learnt_by_all,
        open_swarm.test_another_node_at_an_old_address_leaves_no_ghost,
        open_swarm.test_a_healed_partition_becomes_one_swarm_again,
        open_swarm.test_an_isolated_node_rejoins_when_its_only_peer_comes_back,
        open_swarm.test_requests_carry_steps_and_check_the_responder,
        open_swarm.test_a_changed_activity_is_known_without_waiting,
    ],
    ids=lambda story: story.__name__.removeprefix("test_"),
)
def test_what_holds_in_an_open_swarm_holds_in_a_closed_one(
    story: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same story, every datagram sealed."""
    monkeypatch.setattr(overlay_swarm, "SEALED_BY_DEFAULT", RING)
    story()


@pytest.mark.parametrize(("seed", "loss"), [(21, 0.0), (23, 0.02)])
def test_a_crash_is_found_within_the_bound(seed: int, loss: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an open swarm, with lost first contacts too."""
    monkeypatch.setattr(overlay_swarm, "SEALED_BY_DEFAULT", RING)
    open_swarm.test_a_crash_is_found_within_the_bound_by_its_watchers(seed=seed, loss=loss)


@run_by(run)
async def test_step_queries_cost_an_aead_and_no_signature() -> None:
    """After the first contact, ten rounds of step queries to all nodes start no handshake."""
    world = OverlayWorld(31, keys=RING)
    nodes = await world.raise_swarm(8)
    await asyncio.sleep(3)
    before = dict(world.seals[0].counters)
    for _ in range(10):
        await nodes[0].query_steps([peer.node_id for peer in nodes[0].members()])
        await asyncio.sleep(0.5)
    after = dict(world.seals[0].counters)

    assert after.get("seal_offers_made", 0) == before.get("seal_offers_made", 0)
    assert after["seal_opened"] - before["seal_opened"] >= 70
    await world.stop()


@pytest.mark.promise(8)
@run_by(run)
async def test_an_unauthenticated_peer_changes_nothing() -> None:
    """A node with another key that knows run, genesis, ids and addresses gets no answer, and enters no table."""
    world = OverlayWorld(32, keys=RING)
    nodes = await world.raise_swarm(5)
    await asyncio.sleep(2)
    stranger = world.make(9, keys=KeyRing((NEXT_KEY,)))
    await stranger.start()
    stranger.found(overlay_swarm.GENESIS)
    for node in nodes:
        stranger._membership.verify(node.local.contact)
    await asyncio.sleep(5)

    assert stranger.members() == []
    assert all(len(node.members()) == 4 for node in nodes)
    assert stranger._transport.counters.get("seal_opened", 0) == 0
    for number in range(5):
        assert world.seals[number].counters["seal_dropped_stranger"] > 0
    await world.stop()


@run_by(run)
async def test_recorded_datagrams_change_nothing() -> None:
    """All datagrams of five nodes, replayed to every node from the old sources: no answer, no change."""
    world = OverlayWorld(33, keys=RING)
    recorded: list[tuple[Address, bytes]] = []
    carry = world.network.carry

    def tap(source: MemoryTransport, to: Address, datagram: bytes) -> None:
        recorded.append((source.address, datagram))
        carry(source, to, datagram)

    world.network.carry = tap
    nodes = await world.raise_swarm(5)
    await asyncio.sleep(3)
    world.network.carry = carry
    heard = {node: node._protocol.counters["datagrams_in"] for node in nodes}
    before = {node: sorted((peer.node_id, peer.step, peer.address) for peer in node.members()) for node in nodes}
    sent = {number: world.seals[number].counters["seal_sealed"] for number in range(5)}
    for number in range(5):
        transport = world.seals[number]
        for source, datagram in recorded:
            transport._on_datagram_below(datagram, source)

    assert len(recorded) > 100
    assert {node: node._protocol.counters["datagrams_in"] for node in nodes} == heard
    assert {number: world.seals[number].counters["seal_sealed"] for number in range(5)} == sent
    after = {node: sorted((peer.node_id, peer.step, peer.address) for peer in node.members()) for node in nodes}
    assert after == before
    await world.stop()


@run_by(run)
async def test_a_member_cannot_speak_for_another() -> None:
    """A heartbeat in another's name, sealed under the sender's own session, is dropped and counted: its step has no
    effect."""
    world = OverlayWorld(34, keys=RING)
    nodes = await world.raise_swarm(3)
    await asyncio.sleep(2)
    liar, victim, hearer = nodes
    liar._protocol.set_heartbeat(
        Heartbeat(victim.node_id, 99, 1, PORT, activity=int(Activity.LEAVING), step=777), liar.local.tag
    )
    await liar.query_steps([hearer.node_id])
    peer = hearer.peers.get(victim.node_id)

    assert peer is not None
    assert (peer.step, peer.incarnation, peer.activity) == (0, 1, Activity.TRAINING)
    assert hearer._protocol.counters["dropped_in_anothers_name"] > 0
    await world.stop()


@run_by(run)
async def test_a_false_leave_is_asked_about_and_not_believed() -> None:
    """A member that reports another's leave causes probes and nothing else."""
    world = OverlayWorld(35, keys=RING)
    nodes = await world.raise_swarm(4)
    await asyncio.sleep(2)
    liar, victim, *others = nodes
    lie = Gossip(MemberState.LEFT, victim.node_id, 1)
    for node in others:
        liar._protocol.send_gossip(node.local.contact, [lie])
    await asyncio.sleep(5)

    assert all(node.is_alive(victim.node_id) for node in others)
    await world.stop()


@run_by(run)
async def test_rotating_the_key_loses_no_node() -> None:
    """Nodes change their keys one after the other, each step within seconds of the last: no node is ever suspected. A
    node that kept only the old key is outside in the end."""
    world = OverlayWorld(36, keys=RING)
    nodes = await world.raise_swarm(8)
    await asyncio.sleep(3)
    former = world.make(20)
    await former.start()
    await former.join([f"{address_of(0)}:{PORT}"], genesis=None)
    await asyncio.sleep(1)
    for ring in (
        KeyRing((KEY, NEXT_KEY)),
        KeyRing((NEXT_KEY, KEY)),
        KeyRing((NEXT_KEY,)),
    ):
        for number in range(8):
            world.seals[number].use(ring)
            await asyncio.sleep(0.7)
        await asyncio.sleep(3)
    await asyncio.sleep(6)
    decided = [
        (number, change)
        for number in range(8)
        for _, change in world.changes[number]
        if change.kind in ("suspect", "dead", "left") and change.node_id != former.node_id
    ]

    assert decided == []
    assert all(len(node.members()) == 7 for node in nodes), "all but the one that was expelled"
    await world.until(lambda: former.members() == [], 20.0, "the expelled one has noticed")
    await world.stop()


@run_by(run)
async def test_clocks_within_the_bound_join_and_beyond_it_are_told_of() -> None:
    """Nodes twenty seconds off, either way, become peers; one further off than the bound does not, and its peer warns
    by how much."""
    world = OverlayWorld(37, keys=RING)
    await world.found(0)
    await asyncio.sleep(CLOCK_BOUND_S)
    for number, skew_s in ((1, CLOCK_BOUND_S / 3), (2, -CLOCK_BOUND_S / 3), (3, 3 * CLOCK_BOUND_S)):
        world.clocks[number] = VirtualClock(skew_s=skew_s)
    await world.join(1)
    await world.join(2)
    late = await world.join(3)
    await asyncio.sleep(3)

    assert len(world.nodes[0].members()) == 2
    assert late.members() == []
    warned = [record.fields["ahead_s"] for record in world.records if record.event == "clock_differs"]
    assert pytest.approx(3 * CLOCK_BOUND_S, abs=1) in warned
    await world.stop()
