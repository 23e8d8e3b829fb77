"""One server that others reach, and machines at home: nobody can dial these, so they own nothing and back nothing up.

While the server is away each trains by itself. When it is back there is one model, in which all of that is.
"""

from __future__ import annotations

import asyncio
import copy
import functools
from contextvars import copy_context
from typing import Any

import numpy as np
import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.status.events import EventRing
from p2pnode.status.report import LoopDelay, StatusReport
from p2pnode.status.schema import Finding
from p2pnode.training.exchange.store.replica import has_known_owner
from tests.harness.environment.simulated import MemoryDisk
from tests.harness.environment.virtual_loop import OWNER, VirtualLoop
from tests.harness.network.nat import Nat
from tests.harness.runner.long_run import more
from tests.harness.runner.stories import Fixture, played_by
from tests.harness.swarms.exact_swarm import SHARDS, SIZE, acknowledged, simulate
from tests.harness.swarms.swarm import PORT, Host, Swarm
from tests.harness.trainers.stub_trainer import Vector, delta_of, initial_vector

#: Nodes that write checkpoints.
play = functools.partial(simulate, step_s=0.5, training__checkpoint_s=10.0)
#: One model on all nodes, so long after the return of the server.
RETURN_S = 30.0


def hide(swarm: Swarm, number: int, kind: str = "one") -> Host:
    """A node behind a router of its own, whose bootstrap is the server. `kind`: the router gives the same port for all
    destinations ("one"), another for each, or the host's "own"."""
    address = f"192.168.{number}.2"
    nat = Nat(f"203.0.113.{number}", symmetric=kind == "each", first_port=PORT if kind == "own" else 50000)
    swarm.network.behind(nat, address)
    return swarm.start(f"h{number}", bootstrap="n0", address=address)


async def star(swarm: Swarm, hidden: int, kind: str = "one", *, steps: int = 12, servers: int = 1) -> None:
    if not swarm.hosts:
        swarm.start_many(servers)
    await trained(swarm, 2)
    for number in range(1, hidden + 1):
        hide(swarm, number, kind)
    await trained(swarm, steps)
    before = len(swarm.of("checkpoint_written"))
    await swarm.until(
        lambda: any(record.node == "n0" for record in swarm.of("checkpoint_written")[before:]),
        within_s=60,
        what="a checkpoint of the server is written",
    )
    await trained(swarm, 5)  # which it has acknowledged, and not on its disk


async def trained(swarm: Swarm, steps: int) -> None:
    """Every node makes so many steps from now on."""
    goals = {host.name: host.living.progress.step + steps for host in swarm.running()}
    await swarm.until(
        lambda: all(swarm.hosts[name].living.progress.step >= goal for name, goal in goals.items()),
        within_s=120,
        what=f"{steps} steps everywhere",
    )


def at_home(swarm: Swarm) -> list[Host]:
    return [host for host in swarm.running() if host.name.startswith("h")]


async def merged(swarm: Swarm, within_s: float = RETURN_S) -> None:
    """Wait until the owners have all that the hidden nodes have trained up to now."""
    now = {host.name: host.living.progress.step for host in at_home(swarm)}

    def has_arrived(host: Host) -> bool:
        exchange = host.exchange
        open_steps = [step for step in exchange.outbox.steps if step <= now[host.name]]
        in_doubt = any(owner == b"" for _, owner in exchange.sent.owners())
        is_known = all(has_known_owner(exchange.store, shard) for shard in range(SHARDS))
        return is_known and not (exchange.is_apart or open_steps or in_doubt)

    await swarm.until(lambda: all(map(has_arrived, at_home(swarm))), within_s=within_s, what="one model everywhere")


def steps_in(swarm: Swarm, name: str) -> list[set[tuple[int, int]]]:
    """The deltas of a node that each shard has, as (start, step)."""
    found, me = [], node_id(swarm, name)
    for shard in range(SHARDS):
        owned = next(o for host in swarm.running() if (o := host.exchange.store.owned.get(shard)) is not None)
        rows = [row for row in owned.state.applied.rows() if row[0] == me]
        found.append({(row[1], step) for row in rows for low, high in row[2] for step in range(low, high + 1)})
    return found


def node_id(swarm: Swarm, name: str) -> bytes:
    return swarm.hosts[name].living.identity.node_id


def sum_of(swarm: Swarm, *servers: str) -> Vector:
    """The initial vector, all that the hidden nodes have trained, and what is in the model of these other nodes."""
    total = initial_vector(0, SIZE).astype(np.float64)
    for host in at_home(swarm):
        total += host.trainer.expected() if host.name not in servers else 0.0
    bounds = at_home(swarm)[0].exchange.store.bounds
    for name in servers:
        for (start, stop), deltas in zip(bounds, steps_in(swarm, name), strict=True):
            for _, last in deltas:
                for step in swarm.hosts[name].trainer.parts.get(last, (last,)):
                    total[start:stop] += delta_of(name, step, SIZE)[start:stop]
    return total.astype(np.float32)


async def there_is_one_model(swarm: Swarm, *servers: str) -> None:
    """All that the hidden nodes have trained is in it, once, bit by bit, and every node pulls the same."""
    await swarm.settle()
    value = swarm.model()
    np.testing.assert_array_equal(value, sum_of(swarm, *servers))
    for host in swarm.running():
        await host.exchange.pull(host.living.progress.step)
        np.testing.assert_array_equal(host.trainer.vector, value, err_msg=host.name)
    for host in at_home(swarm):
        assert not host.exchange.store.owned
        assert not host.exchange.store.backed
        if host.name in servers:
            continue
        counters = host.exchange.counters
        assert (counters.refused, counters.lost_in_splits) == (0, 0)


def findings(host: Host, swarm: Swarm) -> list[Finding]:
    return StatusReport(host.living, EventRing(), LoopDelay(swarm.clock)).status().health


@pytest.mark.parametrize(
    ("kind", "hidden", "seed"),
    [
        ("each", 5, 2),
        *more(("one", 4, 1), ("own", 4, 3)),
    ],
)
def test_a_server_that_was_killed_and_is_back_has_all_that_was_trained_meanwhile(
    kind: str, hidden: int, seed: int
) -> None:
    """Half a minute without it, and nobody else owns a shard. Half a minute after its return there is one model. What
    it had acknowledged after its last checkpoint is in it, and what was trained apart; its own steps of that time are
    lost."""

    async def story(swarm: Swarm) -> None:
        await star(swarm, hidden, kind)
        server = swarm.hosts["n0"]
        first, announced = server.trainer, server.living.progress.step
        assert first is not None
        await swarm.kill("n0")
        await asyncio.sleep(RETURN_S)
        for host in at_home(swarm):
            assert host.exchange.is_apart
            assert not host.exchange.store.owned
            [finding] = [one for one in findings(host, swarm) if "can own shards" in one.what]
            assert "trains by itself since step" in finding.what
            assert "start a node that others can reach again" in finding.do
        swarm.start("n0")
        await merged(swarm)
        assert all(not [one for one in findings(host, swarm) if "can own" in one.what] for host in at_home(swarm))
        await trained(swarm, 5)
        await there_is_one_model(swarm, "n0")

        counters, counted = server.exchange.counters, set.intersection(*steps_in(swarm, "n0"))
        former, present = sorted({start for start, _ in counted})
        assert {(former, step) for step in first.trained if step <= announced} - counted
        assert counters.lost_in_restarts == 0
        refused = {(present, step) for step in server.trainer.trained} - counted
        assert counters.refused == SHARDS * len(refused)

    swarm = play(story, seed=seed)
    assert {record.node for record in swarm.of("shards_taken_over")} == {"n0"}


@played_by(play, seed=11)
async def test_a_server_that_was_stopped_for_a_minute_goes_on_with_all_that_was_trained_meanwhile(swarm: Swarm) -> None:
    """As a process that is suspended, or a machine without a line: it has lost nothing, and learns of the minute."""
    sleeper = copy_context()
    sleeper.run(OWNER.set, "n0")
    sleeper.run(lambda: swarm.start("n0"))
    await star(swarm, 4)
    server = swarm.hosts["n0"]
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    swarm.network.pause(server.living.overlay.address)
    loop.stall("n0", 60.0)
    await asyncio.sleep(60.0)
    assert all(host.exchange.is_apart for host in at_home(swarm))
    assert not any(host.exchange.store.owned for host in at_home(swarm))
    swarm.network.resume(server.living.overlay.address)
    await merged(swarm)
    await trained(swarm, 5)
    await there_is_one_model(swarm, "n0")
    assert server.exchange.counters.lost_in_restarts == 0


@pytest.mark.parametrize(("seed", "late_s"), [(21, 5.0), *more((21, 18.0))])
@played_by(play, seed=Fixture("seed"))
async def test_one_of_two_servers_is_enough_and_both_go_on_with_the_newer_disk(swarm: Swarm, *, late_s: float) -> None:
    """The founder is killed, the other goes on with every shard, and nobody trains by itself. Then that one is killed.
    Both come back, the founder first: what only the other had is in the model."""
    await star(swarm, 3, servers=2)
    await swarm.kill("n0")
    other = swarm.hosts["n1"]
    await swarm.until(lambda: len(other.exchange.store.owned) == SHARDS, within_s=15, what="the other has all")
    await trained(swarm, 24)
    await merged(swarm)
    assert not swarm.of("owners_out_of_reach")
    await swarm.kill("n1")
    await asyncio.sleep(20.0)
    assert all(host.exchange.is_apart for host in at_home(swarm))
    assert not any(host.exchange.store.owned for host in at_home(swarm))
    swarm.start("n0")
    await asyncio.sleep(late_s)
    swarm.start("n1", bootstrap="n0")
    await swarm.until(lambda: len(swarm.running()) == 5, within_s=5, what="all run")
    await swarm.until(lambda: swarm.hosts["n1"].living.phase == "training", within_s=40, what="both train")
    await merged(swarm)
    await trained(swarm, 5)
    await there_is_one_model(swarm, "n0", "n1")


@played_by(play, seed=31)
async def test_a_node_that_starts_while_the_server_is_away_waits_for_it(swarm: Swarm) -> None:
    """It says whom it dials and why that fails. It joins when the server is back, and trains with the others."""
    await star(swarm, 2)
    await swarm.kill("n0")
    await asyncio.sleep(10.0)
    late = hide(swarm, 9)
    await asyncio.sleep(20.0)
    assert late.living.phase == "joining"
    [finding] = [one for one in findings(late, swarm) if one.what.startswith("bootstrap 10.0.0.2:8468")]
    assert "see that the node runs" in finding.do
    swarm.start("n0")
    await swarm.until(lambda: late.living.progress.step >= 5, within_s=60, what="it trains")
    await merged(swarm)
    # It begins where the server was: its first steps may be refused as late, which it counts.
    await there_is_one_model(swarm, "n0", "h9")
    assert late.exchange.counters.refused <= 3 * SHARDS


def test_clients_in_one_network_wait_for_the_one_that_founded() -> None:
    """All have set `client_only` and reach each other. The founder owns the model. While it is away no other does, and
    it goes on with what is on its disk: the others say who they are when it asks, and send again what that lacks."""

    async def story(swarm: Swarm) -> None:
        for number in range(3):
            name = f"{'h' if number else 'n'}{number}"
            swarm.start(name, bootstrap="n0" if number else None, node__client_only=True)
            await trained(swarm, 2)
        await trained(swarm, 12)
        await swarm.until(lambda: bool(swarm.of("checkpoint_written")), within_s=60, what="a checkpoint")
        await trained(swarm, 5)
        await swarm.kill("n0")
        await asyncio.sleep(RETURN_S)
        assert all(host.exchange.is_apart for host in at_home(swarm))
        swarm.start("n0", node__client_only=True)
        await merged(swarm)
        await trained(swarm, 5)
        await there_is_one_model(swarm, "n0")

    swarm = play(story, seed=41)
    assert {record.node for record in swarm.of("shards_taken_over")} == {"n0"}


@played_by(play, seed=51)
async def test_neighbours_behind_one_router_do_not_make_each_other_owners(swarm: Swarm) -> None:
    """They reach each other and the server reaches neither: neither owns a shard or backs one up, and both wait for the
    server, although each has a neighbour that could be its backup."""
    swarm.start("n0")
    await trained(swarm, 2)
    swarm.network.behind(Nat("203.0.113.1"), "192.168.1.2", "192.168.1.3")
    for number in (2, 3):
        swarm.start(f"h{number}", bootstrap="n0", address=f"192.168.1.{number}")
    # As after an announcement in their network: they know each other by their own addresses.
    await trained(swarm, 12)
    await asyncio.sleep(70.0)
    assert not any(host.living.overlay.is_eligible for host in at_home(swarm))
    await swarm.kill("n0")
    await asyncio.sleep(70.0)
    assert not any(host.living.overlay.is_eligible for host in at_home(swarm))
    assert all(host.exchange.is_apart for host in at_home(swarm))
    swarm.start("n0")
    await merged(swarm)
    await there_is_one_model(swarm, "n0")


@played_by(play, seed=61)
async def test_a_server_that_has_lost_its_disk_is_replaced_by_a_copy_of_a_member(swarm: Swarm) -> None:
    """Under a new key it founds a swarm of its own: the members do not enter it, own nothing, and say what to do. So it
    is done: started again with the directory of one of them, it has what that one had written, and all go on."""
    await star(swarm, 3)
    genesis = swarm.hosts["n0"].living.overlay.genesis
    await swarm.kill("n0")
    await asyncio.sleep(10.0)
    server = swarm.hosts["n0"]
    server.disk = MemoryDisk()
    swarm.start("n0")
    await asyncio.sleep(RETURN_S)
    assert server.living.overlay.genesis != genesis
    for host in at_home(swarm):
        assert host.exchange.is_apart
        assert not host.exchange.store.owned
        [finding] = [one for one in findings(host, swarm) if "belongs to another swarm" in one.what]
        assert finding.what.startswith("bootstrap 10.0.0.2:8468")
        assert "--reopen" in finding.do

    await swarm.kill("n0")
    member = swarm.hosts["h1"]
    written = [record for record in swarm.of("checkpoint_written") if record.node == "h1"][-1]
    server.disk = copy.deepcopy(member.disk)
    for name in ("identity.key", "incarnation"):
        server.disk.remove(name)
    swarm.start("n0", reopens=True)
    await merged(swarm)
    await trained(swarm, 5)
    await swarm.settle()
    value = swarm.model()
    for host in swarm.running():
        await host.exchange.pull(host.living.progress.step)
        np.testing.assert_array_equal(host.trainer.vector, value, err_msg=host.name)
    assert server.living.overlay.genesis == genesis
    assert server.living.progress.step > written.fields["step"]


def behind_open_port(swarm: Swarm, name: str, address: str, **settings: Any) -> Nat:
    """Start a node behind a router that forwards its port."""
    nat = Nat("203.0.113.200", first_port=PORT)
    swarm.network.behind(nat, address)
    host = swarm.start(name, address=address, node__advertise=f"{nat.public}:{PORT}", **settings)
    nat.forward(PORT, Address(host.address, PORT))
    return nat


@played_by(play, seed=71)
async def test_an_owner_whose_router_closes_hands_its_shards_over_and_backs_none_up(swarm: Swarm) -> None:
    """The founder finds out that nobody reaches it any more, and gives its shards to the other server, as it can still
    dial. As the backup it would get no delta, and each would wait for it."""
    nat = behind_open_port(swarm, "n0", "192.168.9.2")
    await trained(swarm, 2)
    swarm.start("n1", swarm__bootstrap=[f"{nat.public}:{PORT}"], address="198.51.100.1")
    await trained(swarm, 8)
    former, owner = swarm.hosts["n0"], swarm.hosts["n1"]
    nat.forward(PORT, None)
    former.living.overlay._reachability.check_now()
    await swarm.until(lambda: len(owner.exchange.store.owned) == SHARDS, within_s=60, what="the other owns all shards")
    before = swarm.steps()
    await asyncio.sleep(15.0)
    made = [host.living.progress.step - step for host, step in zip(swarm.running(), before, strict=True)]
    print(made)
    assert min(made) > 15
    await swarm.settle()
    assert not any(owned.has_targets for owned in owner.exchange.store.owned.values())
    assert not former.exchange.store.backed
    np.testing.assert_array_equal(swarm.model(), acknowledged(swarm))


@played_by(play, seed=81)
async def test_a_backup_whose_router_closes_holds_nobody_up(swarm: Swarm) -> None:
    """Two servers, of which one is not reached any more, although it lives: the other goes on with all shards, alone,
    and what the first one owned is moved to it."""
    swarm.start("n0", address="198.51.100.1")
    await trained(swarm, 2)
    nat = behind_open_port(swarm, "n1", "192.168.9.2", bootstrap="n0")
    for number in (1, 2):
        hide(swarm, number)
    await trained(swarm, 12)
    server, closed = swarm.hosts["n0"], swarm.hosts["n1"]
    await swarm.until(
        lambda: len(closed.exchange.store.owned | closed.exchange.store.backed) == SHARDS,
        within_s=60,
        what="the second server owns or backs up each shard",
    )
    nat.forward(PORT, None)
    await swarm.until(
        lambda: len(server.exchange.store.owned) == SHARDS, within_s=60, what="the first one owns all shards"
    )
    await merged(swarm)
    before = swarm.steps()
    await asyncio.sleep(15.0)
    made = [host.living.progress.step - step for host, step in zip(swarm.running(), before, strict=True)]
    print(made)
    assert min(made) > 15
    await swarm.settle()
    assert not any(owned.has_targets for owned in server.exchange.store.owned.values())
    np.testing.assert_array_equal(swarm.model(), acknowledged(swarm))


@pytest.mark.parametrize(("kind", "seed"), [("one", 91), *more(("each", 94), ("own", 93))])
def test_under_bsp_all_wait_for_the_server(kind: str, seed: int) -> None:
    """None makes a step without it, and all go on with it: a delta that it had acknowledged is sent again."""

    async def story(swarm: Swarm) -> None:
        await star(swarm, 3, kind)
        await swarm.kill("n0")
        await asyncio.sleep(5.0)
        before = [host.living.progress.step for host in at_home(swarm)]
        await asyncio.sleep(RETURN_S)
        assert [host.living.progress.step for host in at_home(swarm)] == before
        assert not any(host.exchange.store.owned for host in at_home(swarm))
        swarm.start("n0")
        goal = max(before) + 5
        await swarm.until(
            lambda: len(swarm.running()) == 4 and all(host.living.progress.step >= goal for host in swarm.running()),
            within_s=RETURN_S,
            what="they go on together",
        )
        await swarm.settle()
        for host in swarm.running():
            for owned in host.exchange.store.owned.values():
                owned.state.fold(goal + 5, host.exchange.store.rule)
        np.testing.assert_array_equal(swarm.model(), sum_of(swarm, "n0"))

    swarm = play(story, seed=seed, barrier__method="bsp")
    assert swarm.of("deltas_sent_again")
