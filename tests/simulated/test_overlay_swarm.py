"""Overlays on a simulated network: joining, lookups, crashes, leaves, returns. Time is virtual."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from p2pnode.overlay.ids import distance, random_id
from p2pnode.overlay.overlay import NotThisSwarm, Overlay
from p2pnode.overlay.peers import Activity
from p2pnode.overlay.transport import ReceivedResponse, Response, TransportError
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.swarms.overlay_swarm import PORT, OverlayWorld, address_of

DETECTION_S = 6.0


def recall(nodes: list[Overlay], found: list[bytes], target: bytes) -> float:
    """Share of the true 20 closest that a lookup found."""
    true = sorted((node.node_id for node in nodes), key=lambda node_id: distance(node_id, target))[:20]
    return len(set(true) & set(found)) / len(true)


@run_by(run)
async def test_sixty_nodes_join_through_one_and_find_each_other() -> None:
    """Every id resolves to its address from everywhere, and a lookup returns exactly the 20 closest."""
    world = OverlayWorld(seed=11)
    nodes = await world.raise_swarm(60)
    assert world.clock.monotonic() - 1000.0 < 1.0, "60 nodes joined in under a second"
    await asyncio.sleep(2)
    rng = random.Random(11)
    for node in nodes:
        other = rng.choice(nodes)
        found = await node.lookup(other.node_id)
        assert found[0].node_id == other.node_id
        assert found[0].address == other.address
    for _ in range(20):
        target = random_id(rng)
        found = [contact.node_id for contact in await rng.choice(nodes).lookup(target)]
        assert recall(nodes, found, target) == 1.0
        assert found == sorted(found, key=lambda node_id: distance(node_id, target))
    await world.stop()


@run_by(run)
async def test_a_small_swarm_knows_everybody_exactly() -> None:
    """Twelve nodes that join at the same moment all count twelve, exactly, and all may own."""
    world = OverlayWorld(seed=12)
    nodes = await world.raise_swarm(12)
    await world.until(lambda: all(len(node.peers) == 11 for node in nodes), 4.0, "everybody knows everybody")
    await world.until(lambda: all(node.heartbeat.eligible for node in nodes), 2.0, "everybody is eligible")
    await asyncio.sleep(10)
    assert all(node.population().exact and node.population().estimate == 12 for node in nodes)
    assert {node.workers() for node in nodes} == {12.0}
    orders = [[contact.node_id for contact in await node.candidates(b"shard 7")] for node in nodes]
    assert all(order == orders[0] for order in orders)
    assert len(orders[0]) == 12
    await world.stop()


@run_by(run)
async def test_lookups_after_a_fifth_has_crashed_return_no_dead_and_stay_fast() -> None:
    """Right after 20 % crash, lookups return only the living, nearly all of them, within 2 virtual seconds."""
    world = OverlayWorld(seed=13)
    await world.raise_swarm(40)
    await asyncio.sleep(5)
    for number in range(1, 40, 5):
        await world.kill(number)
    living = list(world.nodes.values())
    alive = {node.node_id for node in living}
    rng = random.Random(13)
    times, recalls = [], []
    for _ in range(30):
        target = random_id(rng)
        started = world.clock.monotonic()
        found = [contact.node_id for contact in await rng.choice(living).lookup(target)]
        times.append(world.clock.monotonic() - started)
        recalls.append(recall(living, found, target))
        assert set(found) <= alive
    print(f"max {max(times):.2f} s, median {sorted(times)[15]:.2f} s, recall {sum(recalls) / 30:.3f}")
    assert max(times) < 2.0
    assert sorted(times)[15] < 0.6
    assert sum(recalls) / len(recalls) >= 0.99
    await world.stop()


@pytest.mark.parametrize(("seed", "loss"), [(21, 0.0), (23, 0.02)])
@run_by(run)
async def test_a_crash_is_found_within_the_bound_by_its_watchers(seed: int, loss: float) -> None:
    """A watched partner that falls silent is dead within 6 s at every node that watches it."""
    world = OverlayWorld(seed=seed, loss=loss)
    nodes = await world.raise_swarm(8)
    await world.until(lambda: all(len(node.peers) == 7 for node in nodes), 10.0, "everybody knows everybody")
    victim = nodes[3].node_id
    for node in nodes:
        node.watch([victim])
    await asyncio.sleep(3.37)
    await world.kill(3)
    rest = list(world.nodes.values())
    took = await world.until(lambda: not any(node.is_alive(victim) for node in rest), DETECTION_S, "found out")
    print(f"found dead by all in {took:.2f} s")
    assert all(node.population().estimate == 7 for node in rest)
    await world.stop()


@run_by(run)
async def test_a_failed_request_makes_liveness_look_at_once() -> None:
    """One refused stream to a dead peer and it is dead 5 s later, watched or not."""
    world = OverlayWorld(seed=24)
    nodes = await world.raise_swarm(5)
    await asyncio.sleep(3)
    contact = nodes[0].contact(nodes[4].node_id)
    assert contact is not None
    await world.kill(4, refused=True)
    with pytest.raises(TransportError):
        async with nodes[0].request(contact, "anything", b"", timeout_s=1.0):
            pass
    await world.until(lambda: not nodes[0].is_alive(contact.node_id), 5.0, "found out")
    await world.stop()


@run_by(run)
async def test_nobody_is_falsely_declared_dead() -> None:
    """With 2 % loss, five minutes of twenty nodes pass without a death."""
    world = OverlayWorld(seed=25, loss=0.02)
    nodes = await world.raise_swarm(20)
    await asyncio.sleep(300)
    kinds = [change.kind for changes in world.changes.values() for _, change in changes]
    assert "dead" not in kinds
    assert all(len(node.peers) == 19 for node in nodes)
    await world.stop()


@run_by(run)
async def test_a_leave_is_known_at_once() -> None:
    """Neighbours drop a leaving node within half a second, and no node suspects it afterwards."""
    world = OverlayWorld(seed=26)
    nodes = await world.raise_swarm(10)
    await world.until(lambda: all(len(node.peers) == 9 for node in nodes), 10.0, "everybody knows everybody")
    leaver = nodes[4]
    await leaver.leave()
    rest = [node for node in nodes if node is not leaver]
    await world.until(lambda: not any(node.is_alive(leaver.node_id) for node in rest), 0.5, "all know")
    await leaver.stop()
    await asyncio.sleep(20)
    late = [c.kind for changes in world.changes.values() for _, c in changes if c.node_id == leaver.node_id]
    assert late.count("left") == 9
    assert "dead" not in late
    assert all(len(node.peers) == 8 for node in rest)
    await world.stop()


@run_by(run)
async def test_a_restarted_node_replaces_its_former_self() -> None:
    """Killed and started again on its disk within the suspicion time: `restarted`, at the same id, with peers dialled
    from disk and no bootstrap."""
    world = OverlayWorld(seed=27)
    nodes = await world.raise_swarm(6)
    await asyncio.sleep(3)  # remembered peers are on disk
    nodes[2].announce(step=9)
    await nodes[0].query_steps([nodes[2].node_id])
    await world.kill(2, refused=True)
    again = world.make(2)
    assert again.node_id == nodes[2].node_id
    assert again.heartbeat.incarnation == 2
    await again.start()
    assert again.remembered()
    await again.join([], genesis=nodes[0].genesis)
    again.announce(activity=Activity.TRAINING, step=4)
    await nodes[0].query_steps([again.node_id])

    def is_known() -> bool:
        peer = nodes[0].peers.get(again.node_id)
        return peer is not None and (peer.incarnation, peer.step) == (2, 4)

    await world.until(is_known, 1.0, "its new start is proven, and its step known")
    assert "restarted" in [change.kind for _, change in world.changes[0]]
    await world.until(lambda: len(again.peers) == 5, 3.0, "it knows everybody")
    await world.stop()


@run_by(run)
async def test_a_changed_address_is_learnt_by_all() -> None:
    """The same identity on another address replaces the old one everywhere; lookups give the new one."""
    world = OverlayWorld(seed=28)
    await world.raise_swarm(8)
    await asyncio.sleep(5)
    node_id = world.nodes[5].node_id
    await world.kill(5)
    moved = world.make(5, host="10.9.9.9")
    await moved.start()
    await moved.join([f"{address_of(0)}:{PORT}"], genesis=None)
    rest = [world.nodes[number] for number in (0, 1, 2, 3, 4, 6, 7)]
    await world.until(
        lambda: all((c := node.contact(node_id)) is not None and c.address == moved.address for node in rest),
        5.0,
        "all know the new address",
    )
    await world.stop()


@run_by(run)
async def test_another_node_at_an_old_address_leaves_no_ghost() -> None:
    """A new identity at a known address removes the old one at once, without a suspicion."""
    world = OverlayWorld(seed=29)
    nodes = await world.raise_swarm(6)
    await asyncio.sleep(5)
    ghost = nodes[3].node_id
    await world.kill(3)
    await world.join(77, host=address_of(3))
    rest = [nodes[number] for number in (0, 1, 2, 4, 5)]
    await world.until(lambda: not any(node.is_alive(ghost) for node in rest), 3.0, "the ghost is gone")
    await world.stop()


@run_by(run)
async def test_a_healed_partition_becomes_one_swarm_again() -> None:
    """Halves that declared each other dead know all nodes again within 30 s of the healing."""
    world = OverlayWorld(seed=30)
    nodes = await world.raise_swarm(10)
    await asyncio.sleep(5)
    left, right = nodes[:5], nodes[5:]
    world.network.partition([n.address.host for n in left], [n.address.host for n in right])
    await world.until(lambda: all(len(node.peers) == 4 for node in nodes), 30.0, "each half is alone")
    assert all(node.population().estimate == 5 for node in nodes)
    await asyncio.sleep(60)
    world.network.heal()
    took = await world.until(lambda: all(len(node.peers) == 9 for node in nodes), 30.0, "one swarm again")
    print(f"whole again after {took:.1f} s")
    await asyncio.sleep(20)
    assert all(len(node.peers) == 9 for node in nodes)
    await world.stop()


@run_by(run)
async def test_an_isolated_node_rejoins_when_its_only_peer_comes_back() -> None:
    """A node whose only peer crashed dials again, and joins when that peer is back."""
    world = OverlayWorld(seed=31)
    await world.found(0)
    lonely = await world.join(1)
    await asyncio.sleep(2)
    await world.kill(0)
    await world.until(lambda: len(lonely.peers) == 0, 20.0, "it is alone")
    back = world.make(0)
    await back.start()
    back.found(lonely.genesis or b"")
    await world.until(lambda: len(lonely.peers) == 1 and len(back.peers) == 1, 30.0, "they met")
    await world.stop()


@run_by(run)
async def test_wrong_addresses_are_told_apart() -> None:
    """Another run, the node itself, a closed port, and a node that has not joined each have their own reason."""
    world = OverlayWorld(seed=32)
    await world.found(0)
    await world.make(1, run="other").start()
    await world.make(2).start()
    node = world.make(3)
    await node.start()
    with pytest.raises(NotThisSwarm) as caught:
        await node.join([f"{address_of(1)}:{PORT}", f"{address_of(3)}:{PORT}"], genesis=None)
    reasons = dict(caught.value.failures)
    assert "belongs to run 'other', this node to 'tests'" in reasons[f"{address_of(1)}:{PORT}"]
    assert "is this node itself" in reasons[f"{address_of(3)}:{PORT}"]
    waiting = [f"{address_of(1)}:{PORT}", f"{address_of(2)}:{PORT}", f"{address_of(9)}:{PORT}"]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10):
            await node.join(waiting, genesis=None)
    assert "has not joined a swarm yet" in node.failures[f"{address_of(2)}:{PORT}"]
    assert node.failures[f"{address_of(9)}:{PORT}"]
    logged = [r for r in world.records if r.event == "bootstrap_failed" and r.node == "n3"]
    assert len(logged) <= 8, "said when the reason changes, not each time"
    await world.stop()


@run_by(run)
async def test_a_restarted_node_refuses_another_swarm_of_the_same_name() -> None:
    """With its genesis given, a bootstrap of another genesis is another swarm."""
    world = OverlayWorld(seed=33)
    await world.found(0)
    node = world.make(1)
    await node.start()
    with pytest.raises(NotThisSwarm, match="another swarm"):
        await node.join([f"{address_of(0)}:{PORT}"], genesis=b"another genesis!")
    await world.stop()


@run_by(run)
async def test_requests_carry_steps_and_check_the_responder() -> None:
    """A request brings payload and body both ways; steps arrive with it; a wrong id is refused with both names."""
    world = OverlayWorld(seed=34)
    nodes = await world.raise_swarm(3)
    await asyncio.sleep(2)
    seen = []

    async def shout(peer: Any, payload: bytes, body: Any) -> Response:
        seen.append(peer.node_id)
        return Response(payload.upper(), [bytes([chunk for buffer in [b async for b in body] for chunk in buffer])])

    nodes[1].register("shout", shout)
    nodes[0].announce(step=5)
    nodes[1].announce(step=7)
    contact = nodes[0].contact(nodes[1].node_id)
    assert contact is not None
    async with nodes[0].request(contact, "shout", b"hello", [b"ab", b"cd"], timeout_s=2) as answer:
        assert isinstance(answer, ReceivedResponse)
        assert answer.head == b"HELLO"
        assert b"".join([bytes(chunk) async for chunk in answer.body]) == b"abcd"
    assert seen == [nodes[0].node_id]
    first, second = nodes[0].peers.get(nodes[1].node_id), nodes[1].peers.get(nodes[0].node_id)
    assert first is not None
    assert second is not None
    assert (first.step, second.step) == (7, 5)
    wrong = type(contact)(nodes[2].node_id, contact.address)
    with pytest.raises(TransportError, match=r"this is .*, not"):
        async with nodes[0].request(wrong, "shout", b"", timeout_s=2):
            pass
    with pytest.raises(TransportError, match="does not serve 'whisper'"):
        async with nodes[0].request(contact, "whisper", b"", timeout_s=2):
            pass
    await world.stop()


@run_by(run)
async def test_a_client_only_node_is_never_eligible_and_a_founder_alone_is() -> None:
    """Eligibility: the founder at once, a joiner by dial-back, client_only never."""
    world = OverlayWorld(seed=35)
    founder = await world.found(0)
    assert founder.heartbeat.eligible
    client = await world.join(1, client_only=True)
    server = await world.join(2)
    await world.until(lambda: server.heartbeat.eligible, 2.0, "dial-back")
    await asyncio.sleep(30)
    assert not client.heartbeat.eligible
    assert founder.heartbeat.eligible
    owners = {contact.node_id for contact in await client.candidates(b"key")}
    assert owners == {founder.node_id, server.node_id}
    await world.stop()


@run_by(run)
async def test_stalled_and_paused_peers_are_not_drawn() -> None:
    """Draws and the count of workers hold training peers only."""
    world = OverlayWorld(seed=36)
    nodes = await world.raise_swarm(6)
    await world.until(lambda: all(len(node.peers) == 5 for node in nodes), 10.0, "everybody knows everybody")
    nodes[1].announce(activity=Activity.PAUSED)
    nodes[2].announce(activity=Activity.STALLED)
    await nodes[0].query_steps([nodes[1].node_id, nodes[2].node_id])
    drawn = {peer.node_id for peer in nodes[0].sample(10)}
    assert drawn == {nodes[3].node_id, nodes[4].node_id, nodes[5].node_id}
    assert nodes[0].workers() == 4.0
    assert len(nodes[0].sample(2)) == 2
    await world.stop()


@pytest.mark.long
@run_by(run)
async def test_the_estimate_follows_a_large_swarm() -> None:
    """In a swarm of 60 the interval contains the true size at most nodes, and draws reach nearly all nodes."""
    world = OverlayWorld(seed=37)
    nodes = await world.raise_swarm(60)
    await asyncio.sleep(60)
    populations = [node.population() for node in nodes]
    assert not any(population.exact for population in populations)
    mean = sum(population.estimate for population in populations) / 60
    held = sum(population.low <= 60 <= population.high for population in populations)
    print(f"mean {mean:.1f}, interval holds the truth at {held} of 60")
    assert 54 < mean < 66
    # All nodes share one set of ids, and so its deviation: the misses come together.
    assert held >= 42
    assert sum(48 < node.workers() < 75 for node in nodes) >= 57
    drawn = {peer.node_id for node in nodes[:10] for _ in range(20) for peer in node.sample(10)}
    assert len(drawn) > 54
    nodes[0].all_members()
    await asyncio.sleep(5)
    assert len(nodes[0].all_members()) >= 58
    await world.stop()


@pytest.mark.promise(18)
def test_the_same_seed_gives_the_same_history() -> None:
    """Twice the same seed: the same log, with crashes and loss on the way."""

    def history() -> list[tuple[Any, ...]]:
        async def story() -> list[tuple[Any, ...]]:
            world = OverlayWorld(seed=38, loss=0.05)
            await world.raise_swarm(12)
            await asyncio.sleep(5)
            await world.kill(7)
            await world.nodes[9].leave()
            await asyncio.sleep(20)
            await world.stop()
            return [(r.t, r.node, r.level, r.event, repr(r.fields)) for r in world.records]

        return list(run(story()))

    first, second = history(), history()

    assert len(first) > 100
    assert first == second


@run_by(run)
async def test_a_node_that_accepts_no_streams_is_not_eligible() -> None:
    """Behind a NAT from the start: dial-back fails. Later: two peers whose streams fail make it look again."""
    world = OverlayWorld(seed=39)
    nodes = await world.raise_swarm(4)
    await world.until(lambda: all(node.heartbeat.eligible for node in nodes), 3.0, "all are eligible")
    world.network.unreachable(address_of(9))
    hidden = await world.join(9)
    await asyncio.sleep(10)
    assert not hidden.heartbeat.eligible
    assert "could not connect" in hidden.report().reachable.reason

    world.network.unreachable(nodes[3].address.host)
    for node in nodes[:2]:
        contact = node.contact(nodes[3].node_id)
        assert contact is not None
        for _ in range(2):
            with pytest.raises(TransportError):
                async with node.request(contact, "anything", b"", timeout_s=0.5):
                    pass
        assert nodes[3].node_id not in [c.node_id for c in await node.candidates(b"key")]
    await world.until(lambda: not nodes[3].heartbeat.eligible, 10.0, "it looked again")
    assert all(node.is_alive(nodes[3].node_id) for node in nodes[:2])
    await world.stop()


@run_by(run)
async def test_a_changed_activity_is_known_without_waiting() -> None:
    """Paused: all nodes of a small swarm know it within a network delay."""
    world = OverlayWorld(seed=41)
    nodes = await world.raise_swarm(10)
    await world.until(lambda: all(len(node.peers) == 9 for node in nodes), 10.0, "everybody knows everybody")
    await asyncio.sleep(1)
    nodes[3].announce(activity=Activity.PAUSED)
    await asyncio.sleep(0.05)
    rest = [node for node in nodes if node is not nodes[3]]
    assert all(node.workers() == 9 for node in rest)
    await world.stop()
