"""Five nodes are killed at once and start again in any order: each shard goes on from its highest copy."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.histories.restarts import SETTINGS, SHARDS, WIDTH, CountingTrainer, restart
from tests.harness.runner.long_run import more
from tests.harness.swarms.swarm import Host, Swarm
from tests.harness.trainers.stub_trainer import exponential, initial_vector


@pytest.mark.parametrize(
    "restarts",
    [((1, 10.0, 6.0),), *more((((2, 10.0, 6.0), (3, 10.0, 6.0), (34, 10.0, 6.0)),), (((2079, 10.0, 10.0),),))],
)
@pytest.mark.promise(6)
def test_a_restart_goes_on_from_the_highest_copies_and_reports_what_they_lack(
    restarts: tuple[tuple[int, float, float], ...],
) -> None:
    """All come in time. The values say what is lost: no disk had more of a shard; and what the shards lack of the steps
    that the disks show is counted. No delta is in a value twice."""
    lost = 0
    for seed, spread_s, checkpoint_s in restarts:
        found = restart(seed, spread_s=spread_s, checkpoint_s=checkpoint_s)
        print(found)
        assert (found.lost_from_the_highest, found.doubled) == (0, 0)
        assert found.lost_from_disks <= found.reported
        lost += found.lost
    assert lost > 0


@pytest.mark.parametrize(("seed", "spread_s"), [(5, 10.0), *more((1, 10.0))])
def test_a_restart_that_divides_the_shards_loses_no_more_and_doubles_nothing(seed: int, spread_s: float) -> None:
    """The founder, which may come back last, starts with three parts of each shard; the others take them over, and what
    their disks have. Deltas are counted in each part by itself."""
    parts = 3
    found = restart(seed, spread_s=spread_s, checkpoint_s=6.0, divides=parts)
    print(found)
    assert (found.lost_from_the_highest, found.doubled) == (0, 0)
    assert found.lost > 0


def test_a_node_that_missed_a_division_changes_nothing() -> None:
    """One of three nodes is cut off and trains on, while the others stop and start again with three times the shards,
    which no node can divide its own into while it runs. When it meets them again, neither side takes a delta of the
    other, nor waits for it. Started again, it has their shards and trains with them. At any time a value has the deltas
    that its identities name, each once."""
    cells, seed = 3 * SHARDS, 61
    print(f"seed {seed}")

    async def scenario(swarm: Swarm) -> None:
        hosts = swarm.start_many(3)
        await swarm.until(
            lambda: min(host.living.progress.step for host in hosts) >= 4, within_s=60, what="steps everywhere"
        )
        pair, alone = hosts[:2], hosts[2]
        swarm.network.partition([host.address for host in pair], [alone.address])
        cut_at = alone.living.progress.step
        await asyncio.sleep(20.0)
        for host in pair:
            host.living.leave()
        await swarm.until(lambda: swarm.running() == [alone], within_s=30, what="two have left")
        pair = [swarm.start("n0", exchange__shards=cells), swarm.start("n1", bootstrap="n0", exchange__shards=0)]
        await swarm.until(lambda: all(len(one.trainer.trained) >= 3 for one in pair), within_s=60, what="two train")

        swarm.network.heal()
        met = len(swarm.records)
        await swarm.until(lambda: len(alone.living.overlay.members()) == 2, within_s=180, what="they meet")
        met_at, node = alone.living.progress.step, alone.living.identity.node_id
        pair_at = [host.living.progress.step for host in pair]
        await asyncio.sleep(20.0)
        for host in hosts:
            check_counts(swarm, host)
        assert alone.living.progress.step > met_at
        assert min(host.living.progress.step - at for host, at in zip(pair, pair_at, strict=True)) >= 20
        assert sum(one.event == "shard_move_failed" and one.node != "n2" for one in swarm.records[met:]) < 20
        told = {(one.node, one.fields["reason"]) for one in swarm.of("member_unreliable")}
        assert {("n0", "foreign"), ("n1", "foreign")} <= told
        assert max(steps_of(node, host) for host in pair) <= cut_at + 1
        # The terms of the others are higher, and concern other slices: nobody acts on them.
        assert {record.event for record in swarm.records[met:]}.isdisjoint(
            {"shards_taken_over", "shard_taken_back", "deltas_lost_in_split", "bad_pull_answer", "delta_malformed"}
        )
        assert [len(host.living.exchange.store) for host in hosts] == [cells, cells, SHARDS]

        alone.living.leave()
        await swarm.until(lambda: len(swarm.running()) == 2, within_s=30, what="it has left")
        alone = swarm.start("n2", bootstrap="n0", exchange__shards=0)
        await swarm.until(lambda: len(alone.trainer.trained) >= 5, within_s=60, what="it trains with them")
        await asyncio.sleep(2.0)
        assert len(alone.living.exchange.store) == cells
        assert max(steps_of(node, host) for host in pair) > met_at
        for host in hosts:
            check_counts(swarm, host)

    async def main() -> None:
        swarm = Swarm(
            seed=seed,
            settings={**SETTINGS, "training.checkpoint_s": 5.0},
            make_trainer=lambda name: CountingTrainer(name, cells * WIDTH, step_s=exponential(0.5), start_s=0.3),
        )
        try:
            await scenario(swarm)
        finally:
            await swarm.stop()

    VirtualLoop().run(main(), limit_s=3600)


def steps_of(node: bytes, host: Host) -> int:
    """The last step of a node whose delta is in what a host owns."""
    owned = host.living.exchange.store.owned.values()
    rows = [row for one in owned for row in one.state.applied.rows() if row[0] == node]
    return max((high for _, _, ranges in rows for _, high in ranges), default=0)


def check_counts(swarm: Swarm, host: Host) -> None:
    """Every value that a host owns has as many deltas of each node as the identities beside it; where it began as a
    replica, as many in all as there are identities and unlisted ones."""
    names = {one.living.identity.node_id: int(name[1:]) for name, one in swarm.hosts.items()}
    store = host.living.exchange.store
    initial = initial_vector(0, store.bounds[-1][1])
    for shard, owned in store.owned.items():
        named = np.zeros(len(names), int)
        for node, _, ranges in owned.state.applied.rows():
            named[names[node]] += sum(high - low + 1 for low, high in ranges)
        counts = np.rint(owned.state.value - initial[slice(*store.bounds[shard])]).astype(int).reshape(-1, WIDTH)
        counts, unlisted = counts[:, : len(names)], owned.state.unlisted
        assert (counts.sum(axis=1) == named.sum() + unlisted).all(), f"{host.name}, shard {shard}: {counts} of {named}"
        assert unlisted or (counts == named).all(), f"{host.name}, shard {shard}: {counts} of {named}"
