"""Nodes behind a NAT: they own nothing, and pull, train and report, whatever port the NAT gives them."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from p2pnode.overlay.peers import Activity
from p2pnode.overlay.sealing.swarm_key import KeyRing, SwarmKey
from p2pnode.overlay.transport import TransportError
from p2pnode.status.events import EventRing
from p2pnode.status.report import LoopDelay, StatusReport
from p2pnode.terminal.lines import Style
from p2pnode.terminal.status_view import status_lines
from p2pnode.training.shards.applied import DeltaId
from tests.harness.environment.virtual_loop import run
from tests.harness.network.nat import Nat
from tests.harness.runner.stories import run_by
from tests.harness.swarms.overlay_swarm import OverlayWorld, address_of
from tests.harness.swarms.swarm import Swarm
from tests.harness.trainers.stub_trainer import StubTrainer

PUBLIC = "203.0.113.7"
KEYS = KeyRing((SwarmKey(bytes(range(32))),))


@pytest.mark.parametrize("symmetric", [False, True], ids=["one port", "a port per peer"])
@pytest.mark.parametrize("keys", [None, KEYS], ids=["open", "sealed"])
@run_by(run, limit_s=3600)
async def test_a_node_behind_a_nat_is_known_where_its_datagrams_come_from(
    symmetric: bool, keys: KeyRing | None
) -> None:
    """All know it and it knows all, latecomers too. No node makes it an owner or opens a stream to it. A new port in
    mid-session is found, under either kind of NAT, without a false death."""
    world = OverlayWorld(seed=71, keys=keys)
    nat = Nat(PUBLIC, symmetric=symmetric)
    world.network.behind(nat, address_of(9))
    nodes = await world.raise_swarm(3)
    hidden = await world.join(9)
    nodes.append(await world.join(4))

    def all_know_it() -> bool:
        return len(hidden.peers) == 4 and all(hidden.node_id in node.peers for node in nodes)

    await world.until(all_know_it, 30.0, "it and the others know each other")
    await asyncio.sleep(20)
    assert not hidden.heartbeat.eligible
    assert "could not connect" in hidden.report().reachable.reason
    for node in nodes:
        contact = node.contact(hidden.node_id)
        assert contact is not None
        assert contact.address.host == PUBLIC
        assert not node.may_own(node.peers.get(hidden.node_id))
        began = world.clock.monotonic()
        with pytest.raises(TransportError, match="NAT"):
            async with node.request(contact, "anything", b"", timeout_s=5.0):
                pass
        assert world.clock.monotonic() == began, "nobody waits for a stream that cannot get in"
    assert all(node.heartbeat.eligible for node in nodes)

    before = {node.contact(hidden.node_id) for node in nodes}
    nat.rebind()
    hidden.announce(step=7)
    await world.until(
        lambda: all((peer := node.peers.get(hidden.node_id)) and peer.step == 7 for node in nodes),
        20.0,
        "its step reaches everybody from the new ports",
    )
    await asyncio.sleep(30)
    assert all_know_it()
    assert not before & {node.contact(hidden.node_id) for node in nodes}
    changes = [change for number in (0, 1, 2, 4) for _, change in world.changes[number]]
    assert not [change for change in changes if change.kind == "dead"]
    assert {change.kind for change in changes if change.node_id == hidden.node_id} >= {"up", "moved"}
    await world.stop()


@run_by(run, limit_s=3600)
async def test_a_node_behind_a_nat_is_removed_when_it_crashes_and_known_when_it_returns() -> None:
    """Liveness is the same for it: dead within the bound, and back under its next incarnation."""
    world = OverlayWorld(seed=72)
    world.network.behind(Nat(PUBLIC), address_of(9))
    nodes = await world.raise_swarm(3)
    hidden = await world.join(9)
    await world.until(lambda: all(hidden.node_id in node.peers for node in nodes), 10.0, "it is known")
    await world.kill(9)
    await world.until(lambda: not any(hidden.node_id in node.peers for node in nodes), 15.0, "it is dead")
    again = await world.join(9)
    await world.until(lambda: all(again.node_id in node.peers for node in nodes), 10.0, "it is back")
    await again.leave()
    await world.until(lambda: not any(again.node_id in node.peers for node in nodes), 2.0, "it has left")
    await world.stop()


@run_by(run, limit_s=3600)
async def test_two_behind_nats_of_their_own_meet() -> None:
    """Each gets the other's contact from a third, and both pings go out: where a NAT keeps one port for all, they get
    in."""
    world = OverlayWorld(seed=73)
    world.network.behind(Nat(PUBLIC), address_of(8))
    world.network.behind(Nat("203.0.113.8"), address_of(9))
    await world.raise_swarm(2)
    one, other = await world.join(8), await world.join(9)
    await world.until(lambda: other.node_id in one.peers and one.node_id in other.peers, 60.0, "they know each other")
    assert not one.heartbeat.eligible
    assert not other.heartbeat.eligible
    await world.stop()


@run_by(run, limit_s=3600)
async def test_many_behind_nats_do_not_keep_others_from_owning() -> None:
    """With one node that is reachable and eight that are not, a newcomer is still confirmed, by that one."""
    world = OverlayWorld(seed=74)
    founder = await world.found()
    for number in range(10, 18):
        world.network.behind(Nat(f"203.0.113.{number}"), address_of(number))
        await world.join(number)
    await world.until(lambda: len(founder.peers) == 8, 30.0, "the founder knows them")
    newcomer = await world.join(1)
    await world.until(lambda: len(newcomer.peers) == 9, 60.0, "the newcomer knows all")
    await world.until(lambda: newcomer.heartbeat.eligible, 130.0, "it is confirmed")
    assert newcomer.report().reachable.confirmed_by == [founder.node_id.hex()[:8]]
    await world.stop()


@run_by(run, limit_s=3600)
async def test_an_unreachable_node_trains_learns_and_reports() -> None:
    """Its inbound traffic is blocked, and its NAT's port changes during the run. It owns nothing, its deltas are in
    every model, and its steps are known. Its status names what is wrong and the three things to do."""
    swarm = Swarm(
        seed=75,
        settings={"barrier.method": "pssp", "exchange.shards": 8},
        make_trainer=lambda name: StubTrainer(name, step_s=0.2),
    )
    nat = Nat(PUBLIC)
    swarm.start_many(3)
    await swarm.until(lambda: len(swarm.running()) == 3, within_s=1, what="they run")
    swarm.network.behind(nat, "10.0.0.5")
    hidden = swarm.start("n3", bootstrap="n0")
    assert hidden.address == "10.0.0.5"
    node = hidden.living
    await swarm.until(lambda: node.progress.step >= 20, within_s=60, what="it trains")
    others = [swarm.hosts[f"n{number}"].living for number in range(3)]

    def seen_step() -> int:
        seen = [other.overlay.peers.get(node.identity.node_id) for other in others]
        return min(0 if peer is None else peer.step for peer in seen)

    await swarm.until(lambda: seen_step() >= 15, within_s=30, what="all see its steps")
    report = StatusReport(node, EventRing(), LoopDelay(swarm.clock))
    status = msgspec.to_builtins(report.status())
    assert status["exchange"]["shards_owned"] == status["exchange"]["shards_backed"] == 0
    assert not status["node"]["eligible"]
    assert status["exchange"]["bytes_received"] > 0
    assert all(peer.activity is Activity.TRAINING for peer in node.overlay.members())
    [finding] = [entry for entry in status["health"] if "cannot be reached from outside" in entry["what"]]
    assert finding["what"].startswith("your port 8468 cannot be reached from outside")
    for number, thing in ((1, "forward UDP and TCP 8468"), (2, 'node.nat = "auto"'), (3, "node.client_only")):
        assert f"({number}) " in finding["do"]
        assert thing in finding["do"]
    assert "your port 8468 cannot be reached from outside" in "\n".join(
        map(Style().render, status_lines(status, Style()))
    )

    nat.rebind()
    step = node.progress.step
    await swarm.until(lambda: node.progress.step >= step + 30, within_s=60, what="it trains on")
    await swarm.until(lambda: seen_step() >= step + 15, within_s=30, what="all see its steps again")
    delta = DeltaId(node.identity.node_id, node.incarnation, step + 10)
    owned = [shard for other in others if other.exchange is not None for shard in other.exchange.store.owned.values()]
    assert len(owned) == 8
    assert all(delta in shard.state.applied for shard in owned), "what it learned since is in the model"
    assert not swarm.of("peer_dead")
    await swarm.stop()
