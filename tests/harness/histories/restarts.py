"""Random restarts of a killed swarm, and the truth about what each has lost.

A node's delta adds 1 to its own value of each shard. So the values of a shard count the deltas of each node that it
has, whatever is written in its identities.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from p2pnode.training.files import checkpoint
from p2pnode.training.layout import shard_bounds
from p2pnode.training.trainer_link.interface import StepOrder
from tests.harness.environment.simulated import ListLog
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.swarms.swarm import Swarm
from tests.harness.trainers.stub_trainer import StubTrainer, exponential, initial_vector, plain_layout

NODES = 5
SHARDS = 4
#: Values of one shard; the first `NODES` count deltas.
WIDTH = 8

SETTINGS: dict[str, Any] = {
    "exchange.weight": "sum",
    "exchange.outer_lr": 1.0,
    "exchange.outer_momentum": 0.0,
    "exchange.codec": "float32",
    "exchange.shards": SHARDS,
    "training.linger_s": 30.0,
    "training.min_nodes": 1,
    "barrier.method": "asp",
}


class CountingTrainer(StubTrainer):
    """Its delta adds 1 to its node's value of every shard."""

    async def write_delta(self, order: StepOrder) -> None:
        self.own[:] = 0.0
        self.own[int(self.name[1:]) :: WIDTH] = 1.0


@dataclass(frozen=True)
class Restart:
    """What one random restart did. Deltas are counted per shard."""

    seed: int
    order: tuple[str, ...]
    delays_s: tuple[float, ...]
    #: Acknowledged deltas that the model lacks after the restart, and deltas that it has twice.
    lost: int
    doubled: int
    #: Deltas that the highest copy of each shard on any disk has more than the shard.
    lost_from_the_highest: int
    #: Deltas that the shards lack of the steps which the nodes had reached, as their disks say.
    lost_from_disks: int
    #: What the log reported as lost.
    reported: int


def counted(swarm: Swarm) -> np.ndarray:
    """Deltas that the owners' values have, int[shards, nodes]."""
    value = swarm.model() - initial_vector(0, SHARDS * WIDTH)
    return np.rint(value.reshape(SHARDS, WIDTH)[:, :NODES]).astype(int)


def on_disks(swarm: Swarm) -> tuple[np.ndarray, np.ndarray]:
    """Deltas that each disk has, in the vector or the states of its newest checkpoint, int[disks, shards, nodes]; and
    the step that its node had reached, int[disks]."""
    layout, initial = plain_layout(SHARDS * WIDTH), initial_vector(0, SHARDS * WIDTH)
    bounds = shard_bounds(layout.total, SHARDS)
    log = ListLog([], "", swarm.clock)
    found, reached = [], []
    for host in swarm.hosts.values():
        newest = checkpoint.newest(host.disk, log)
        values = initial.copy()
        reached.append(0 if newest is None else newest.state.step)
        if newest is None:
            found.append(values - initial)
            continue
        checkpoint.read_vector(host.disk, newest.folder, layout, values)
        states = checkpoint.read_states(host.disk, newest, bounds, layout.total, log)
        for shard, stored in states.items():
            values[slice(*bounds[shard])] = np.maximum(values[slice(*bounds[shard])], stored.state.value)
        found.append(values - initial)
    return np.rint(np.array(found).reshape(-1, SHARDS, WIDTH)[:, :, :NODES]).astype(int), np.array(reached)


async def _restart(swarm: Swarm, seed: int, spread_s: float, checkpoint_s: float, *, shows: bool) -> Restart:
    chance = random.Random(f"{seed}/restart")
    swarm.start_many(NODES, training__checkpoint_s=checkpoint_s)
    names = list(swarm.hosts)

    await swarm.until(lambda: min(swarm.steps()) >= 3, within_s=60, what="steps everywhere")
    await asyncio.sleep(chance.uniform(checkpoint_s, 4 * checkpoint_s))
    before = counted(swarm)
    for name in names:
        await swarm.kill(name)
    disks, reached = on_disks(swarm)
    killed = len(swarm.records)
    order = chance.sample(names, NODES)
    delays = sorted(chance.uniform(0.0, spread_s) for _ in names)
    began = swarm.clock.monotonic()
    for name, delay_s in zip(order, delays, strict=True):
        await asyncio.sleep(max(0.0, began + delay_s - swarm.clock.monotonic()))
        bootstrap = None if name == "n0" else "n0"
        swarm.start(name, bootstrap=bootstrap, training__checkpoint_s=checkpoint_s)
    await swarm.until(
        lambda: all(len(host.trainer.trained) >= 5 for host in swarm.running()), within_s=120, what="all train again"
    )
    await asyncio.sleep(10.0)
    await swarm.settle()
    after = counted(swarm)
    since = np.array([len(swarm.hosts[name].trainer.trained) for name in names])
    missing = before + since[None, :] - after
    # A node that starts some steps behind the replica that a shard goes on with has its first deltas refused.
    after_kill = (one for one in swarm.records[killed:] if one.event == "delta_refused")
    refused = sum(sum(one.fields["reasons"].values()) for one in after_kill)
    kept = after - since[None, :]
    highest = disks.sum(axis=2).max(axis=0)
    if shows:
        print("lost", missing.tolist(), "reached", reached.tolist(), "kept", kept.tolist(), sep="\n")
    return Restart(
        seed,
        tuple(order),
        tuple(round(delay, 1) for delay in delays),
        int(missing[missing > 0].sum()) - refused,
        int(-missing[missing < 0].sum()),
        max(0, int(np.maximum(0, highest - kept.sum(axis=1)).sum()) - refused),
        max(0, int(np.maximum(0, reached[None, :] - kept).sum()) - refused),
        sum(record.fields["deltas_lost"] for record in swarm.of("swarm_resumed")),
    )


def restart(seed: int, *, spread_s: float = 30.0, checkpoint_s: float = 10.0, log: bool = False) -> Restart:
    """Five nodes train, are killed at one moment, and start again in random order within `spread_s`."""
    results: list[Restart] = []

    async def main() -> None:
        swarm = Swarm(
            seed=seed,
            settings=SETTINGS,
            make_trainer=lambda name: CountingTrainer(name, SHARDS * WIDTH, step_s=exponential(0.5), start_s=0.3),
        )
        try:
            results.append(await _restart(swarm, seed, spread_s, checkpoint_s, shows=log))
        finally:
            if log:
                for record in swarm.records:
                    print(f"{record}")
            await swarm.stop()

    VirtualLoop().run(main(), limit_s=3600)
    return results[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--histories", type=int, default=100)
    parser.add_argument("--spread-s", type=float, default=30.0)
    parser.add_argument("--checkpoint-s", type=float, default=10.0)
    parser.add_argument("--log", action="store_true")
    chosen = parser.parse_args()
    for seed in range(chosen.seed, chosen.seed + chosen.histories):
        found = restart(
            seed,
            spread_s=chosen.spread_s,
            checkpoint_s=chosen.checkpoint_s,
            log=chosen.log,
        )
        print(found, flush=True)


if __name__ == "__main__":
    main()
