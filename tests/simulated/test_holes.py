"""Two members that do not reach each other, while others reach both: whole nodes on the simulated network."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import pytest

from p2pnode.overlay.ids import short
from p2pnode.overlay.kademlia.messages import GENESIS_BYTES
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Buffer, FailureKind, RequestRejected, Response
from p2pnode.status.schema import Status
from p2pnode.training.exchange.messages import Pull, PullAnswer, PullResult, decode, encode
from p2pnode.training.exchange.recovery.rebalancing import TENURE_S
from p2pnode.training.shards.applied import DeltaId
from tests.harness.runner.long_run import more
from tests.harness.runner.stories import played_by
from tests.harness.swarms.exact_swarm import SIZE
from tests.harness.swarms.exact_swarm import simulate as simulate_exact
from tests.harness.swarms.status_swarm import report
from tests.harness.swarms.swarm import Host, Swarm
from tests.harness.trainers.stub_trainer import initial_vector

SHARDS = 32
simulate = functools.partial(simulate_exact, exchange__shards=SHARDS)
#: How a stream fails: what this node's own kernel or the other's says, and a firewall that drops everything.
REFUSED: tuple[FailureKind, str] = ("refused", "refused the connection: no process listens there")
OTHER_NETWORK: tuple[FailureKind, str] = ("refused", "cannot be reached: No route to host")
OTHER_CLOCK: tuple[FailureKind, str] = ("reset", "closed the connection without an answer")
SILENT = None
HOLES = {"refused": REFUSED, "network": OTHER_NETWORK, "clock": OTHER_CLOCK, "silent": SILENT}

Handler = Callable[[Contact, bytes, AsyncIterator[Buffer]], Awaitable[Response]]


def address(number: int) -> str:
    """Of the machine that is started as the `number`-th, from 0."""
    return f"10.0.0.{number + 2}"


async def trained(swarm: Swarm, step: int, within_s: float = 120) -> float:
    return await swarm.until(lambda: min(swarm.steps()) >= step, within_s=within_s, what=f"step {step} everywhere")


def assert_conserved(swarm: Swarm) -> None:
    """Each delta of each node is in every shard, by its identity, and in the value exactly once."""
    stores = [host.exchange.store for host in swarm.running()]
    expected = initial_vector(0, SIZE).astype(np.float64)
    for host in swarm.running():
        expected += host.trainer.expected()
        node, incarnation = host.living.overlay.node_id, host.living.incarnation
        for shard in range(SHARDS):
            (owned,) = [store.owned[shard] for store in stores if shard in store.owned]
            lacking = [step for step in host.trainer.trained if not owned.state.knows(DeltaId(node, incarnation, step))]
            assert lacking == [], f"shard {shard} lacks deltas of {host.name}"
    np.testing.assert_array_equal(swarm.model(), expected.astype(np.float32))


def status(swarm: Swarm, host: Host) -> Status:
    return report(swarm, host).status()


def findings(swarm: Swarm, host: Host) -> list[str]:
    return [finding.what for finding in status(swarm, host).health if "can join this swarm" not in finding.what]


# -- a joiner ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["silent", *more("refused", "network", "clock")])
@played_by(simulate, seed=61)
async def test_a_joiner_that_cannot_reach_one_owner_joins(swarm: Swarm, *, how: str) -> None:
    """It is told so at once, or never: it has the model within 15 s, what it trains is in all shards, and what the
    owner trains comes to it."""
    swarm.start_many(3)
    await trained(swarm, 5)
    swarm.network.hole(address(1), address(3), HOLES[how])
    assert len(swarm.hosts["n1"].exchange.store.owned) > SHARDS // 5
    joiner = swarm.start("late", bootstrap="n0")
    await swarm.until(lambda: joiner.living.state in ("training", "waiting"), within_s=15, what="it trains")
    await swarm.until(lambda: len(joiner.trainer.trained) >= 8, within_s=60, what="it goes on")
    await swarm.settle()

    assert_conserved(swarm)


def put_off(head: bytes) -> Response:
    return Response(
        encode(PullAnswer([PullResult(one.shard, "retry") for one in decode(head[GENESIS_BYTES:], Pull).shards]))
    )


def reject(_head: bytes) -> Response:
    raise RequestRejected("the disk of this node is full")


def talk_nonsense(_head: bytes) -> Response:
    return Response(b"\x93nonsense")


ANSWERS = {"put_off": put_off, "reject": reject, "talk_nonsense": talk_nonsense}


def pulls_are_answered(host: Host, how: str) -> None:
    """From now on a node answers each pull so."""

    async def handler(_sender: Contact, head: bytes, _stream: AsyncIterator[Buffer]) -> Response:
        return ANSWERS[how](head)

    host.living.overlay.register("pull", handler)


@pytest.mark.parametrize("how", ["reject", *more("put_off", "talk_nonsense")])
@played_by(simulate, seed=62)
async def test_a_joiner_takes_from_the_backup_what_an_owner_does_not_serve(swarm: Swarm, *, how: str) -> None:
    """The owner answers, and sends no value: its shards come from other members, those that back them up first."""
    swarm.start_many(3)
    await trained(swarm, 5)
    await asyncio.sleep(TENURE_S + 10.0)  # each shard has come to its best candidates
    owner = swarm.hosts["n1"]
    pulls_are_answered(owner, how)
    backups = {one.backup.node_id.hex()[:8] for one in owner.exchange.store.owned.values() if one.backup is not None}
    joiner = swarm.start("late", bootstrap="n0")
    await swarm.until(lambda: joiner.living.state in ("training", "waiting"), within_s=15, what="it trains")

    changes = [record.fields for record in swarm.of("donor_changed")]
    assert {one["donor"] for one in changes} <= backups
    assert {owner for one in changes for owner in one["slow"]} == {short(owner.living.overlay.node_id)}


@played_by(simulate, seed=63)
async def test_a_joiner_names_the_owner_that_it_waits_for_and_the_reason(swarm: Swarm) -> None:
    """Nobody serves the shards of one owner: after 10 s `/status` says whose they are, at which address, and why."""
    swarm.start_many(2)
    await trained(swarm, 3)
    await asyncio.sleep(5.0)
    for host in swarm.running():
        pulls_are_answered(host, "reject")
    joiner = swarm.start("late", bootstrap="n0")
    await asyncio.sleep(13.0)

    seen = status(swarm, joiner)
    assert seen.state == "joining"
    assert "0 % of the model is here" in seen.summary
    (found,) = [one for one in findings(swarm, joiner) if "do not come" in one]
    for owner in (swarm.hosts["n0"], swarm.hosts["n1"]):
        count = len(owner.exchange.store.owned)
        where = f"{count} of {short(owner.living.overlay.node_id)} at {owner.living.overlay.address} for 1"
        assert where in found
        assert where in seen.summary
    assert found.count("(the disk of this node is full)") == 2


# -- members ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "method", "when"),
    [
        ("refused", "bsp", "later"),
        *more(
            ("silent", "pssp", "before"),
            ("clock", "bsp", "before"),
            ("network", "asp", "later"),
        ),
    ],
)
def test_members_on_both_sides_of_a_hole_exchange_all_shards(how: str, method: str, when: str) -> None:
    """Whether they have met before or not, each has the deltas of the other in all shards, exactly once, while the
    hole is there. Nobody stands longer than the detection bound."""

    async def scenario(swarm: Swarm) -> None:
        if when == "before":
            swarm.network.hole(address(1), address(2), HOLES[how])
        swarm.start_many(3)
        await trained(swarm, 5)
        if when == "later":
            swarm.network.hole(address(1), address(2), HOLES[how])
            await asyncio.sleep(25.0)  # under bsp a step waits for a peer that is not heard, once
        first = min(swarm.steps())
        await trained(swarm, first + 10, within_s=60)
        rows = [row for host in swarm.running() for row in list(host.living.progress.steps)[-5:]]
        assert [row["pull_missing"] for row in rows] == [0] * 15
        await swarm.settle()

        assert_conserved(swarm)
        (found,) = [what for what in findings(swarm, swarm.hosts["n1"]) if "only by way" in what]
        other, between = swarm.hosts["n2"].living.overlay, swarm.hosts["n0"].living.overlay
        reason = "did not answer for" if HOLES[how] is None else HOLES[how][1]
        way = f"is reached only by way of {short(between.node_id)}"
        assert found.startswith(f"{short(other.node_id)} at {other.address} {way}: {reason}")

    least = 2 if when == "before" else 3
    simulate(scenario, seed=64, barrier__method=method, training__min_nodes=least)


@played_by(simulate, seed=65)
async def test_a_hole_that_closes_ends_the_detour(swarm: Swarm) -> None:
    """Within a minute requests are direct again, and the finding goes."""
    swarm.network.hole(address(1), address(2), REFUSED)
    swarm.start_many(3)
    await trained(swarm, 20)
    assert [one for one in findings(swarm, swarm.hosts["n1"]) if "only by way" in one]
    swarm.network.heal()
    await swarm.until(
        lambda: not any(host.exchange.view.score.unreached() for host in swarm.running()),
        within_s=61,
        what="all are reached directly",
    )
    assert findings(swarm, swarm.hosts["n1"]) == []
    await swarm.settle()

    assert_conserved(swarm)


@played_by(simulate, seed=66)
async def test_a_member_names_the_owner_that_takes_no_deltas_and_the_reason(swarm: Swarm) -> None:
    """An owner rejects each push of one member, so no other helps: the finding names it, its address and its reason."""
    swarm.start_many(3)
    await trained(swarm, 5)
    owner = swarm.hosts["n1"].living

    async def handler(_sender: Contact, head: bytes, _stream: AsyncIterator[Buffer]) -> Response:
        return reject(head)

    owner.overlay.register("push", handler)
    await asyncio.sleep(14.0)

    (found,) = [what for what in findings(swarm, swarm.hosts["n2"]) if "wait for their owners" in what]
    owned = len(owner.exchange.store.owned)
    assert f": {owned} of {short(owner.overlay.node_id)} at {owner.overlay.address} for 1" in found
    assert found.endswith("(the disk of this node is full)")
