"""A swarm that starts behind slow lines, with the defaults: whole nodes, each on a line of its own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest

from p2pnode.training.trainer_link.interface import StepOrder, StepReport
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.runner.long_run import more
from tests.harness.swarms.swarm import Host, Swarm
from tests.harness.trainers.stub_trainer import StubTrainer

MBIT = 1e6 / 8
NODES, VALUES, STEP_S = 4, 1_250_000, 20.0
#: By default, for so few values.
SHARDS = 64
#: A quarter of 5 M parameters, and a quarter of 5 Mbit/s: 4 bytes per parameter take as long as there.
RATE, DELAY_S = 1.25 * MBIT, 0.08
#: From the first step on: four of them.
MEASURED_S = 80.0


class RestingTrainer(StubTrainer):
    """Rests for a step, makes noise as a delta, and notes when its steps began and ended."""

    def __init__(self, name: str) -> None:
        super().__init__(name, VALUES, step_s=STEP_S)
        self.noise = 1e-3 * np.random.default_rng(int(name[1:])).standard_normal(VALUES, np.float32)
        self.notes: list[tuple[float, float]] = []
        self.waits = False

    async def start(self, *_: object, **__: object):
        self.starts = 1  # it writes its own first values
        self.vector[:] = np.random.default_rng(9).standard_normal(VALUES, np.float32)
        return await super().start()

    async def train(self, order: StepOrder) -> StepReport:
        began = asyncio.get_running_loop().time()
        self.notes.append((began, began + STEP_S))
        return await super().train(order)

    async def write_delta(self, order: StepOrder) -> None:
        self.own[:] = np.roll(self.noise, order.step)

    def share(self, began: float, ended: float) -> float:
        inside = (min(stop, ended) - max(start, began) for start, stop in self.notes)
        return sum(seconds for seconds in inside if seconds > 0) / (ended - began)


@dataclass
class Found:
    shares: list[float]
    settled_s: float
    refused: int
    swarm: Swarm


def started() -> Found:
    """Four nodes, from nothing until four steps after the first step began."""
    seed = 3
    print(f"seed {seed}")

    async def main() -> Found:
        swarm = Swarm(
            seed=seed,
            settings={"training.min_nodes": NODES},
            make_trainer=RestingTrainer,
            delay=(DELAY_S, 1.05 * DELAY_S),
        )
        for number in range(NODES):
            swarm.network.line(f"10.0.0.{number + 2}", RATE)
        hosts = swarm.start_many(NODES)
        trainers = [trainer_of(host) for host in hosts]
        await swarm.until(
            lambda: all(trainer.notes for trainer in trainers), within_s=120.0, what="all train", every_s=0.5
        )
        began = max(trainer.notes[0][0] for trainer in trainers)
        settled_s = await swarm.until(lambda: is_backed(hosts), within_s=60.0, what="backups", every_s=0.5)
        await asyncio.sleep(began + MEASURED_S - swarm.clock.monotonic())
        shares = [trainer.share(began, began + MEASURED_S) for trainer in trainers]
        refused = sum(host.exchange.counters.refused for host in hosts if host.exchange is not None)
        await swarm.stop()
        return Found(shares, settled_s, refused, swarm)

    return VirtualLoop().run(main(), limit_s=600, strict=False)


def trainer_of(host: Host) -> RestingTrainer:
    assert isinstance(host.trainer, RestingTrainer)
    return host.trainer


def shards_of(host: Host, hosts: list[Host]) -> tuple[int, int]:
    """How many shards a node owns, and how many it backs up or is sent for that."""
    node_id = host.living.overlay.node_id
    stores = [each.exchange.store for each in hosts if each.exchange is not None]
    owned = [each for store in stores for each in store.owned.values()]
    return (
        len(host.exchange.store.owned),
        sum(node_id in [target.node_id for target in each.targets()] for each in owned),
    )


def is_backed(hosts: list[Host]) -> bool:
    """Whether every shard has an owner with a backup, and no node has the half of them."""
    stores = [host.exchange.store for host in hosts if host.exchange is not None]
    owned = [each for store in stores for each in store.owned.values()]
    most = max(len(store.owned) for store in stores)
    return len(owned) == len(stores[0]) > 2 * most and all(each.backup is not None for each in owned)


@pytest.mark.promise(10)
def test_behind_slow_lines_a_swarm_trains_from_its_first_step_on() -> None:
    """The states of the shards are in place before the first deltas are pushed, and no exchange keeps a trainer
    waiting: without careful codecs and short copies it would, for minutes."""
    found = started()
    print(found.shares, found.settled_s)

    assert found.settled_s < STEP_S + 5.0
    assert min(found.shares) >= 0.97
    assert found.refused == 0
    events = [record.event for record in found.swarm.records]
    for event in ("pull_unfinished", "shard_move_failed", "peer_suspect", "delta_refused"):
        assert event not in events, event
    # A delta of a shard whose backup is moved is forwarded beside the copy: of some sixteen pushes a few last longer.
    assert events.count("push_unfinished") <= 6


def share_of_a_slow_node(*, joins_late: bool) -> tuple[list[int], list[float], int]:
    """Three fast nodes and one on a line of a twentieth, which starts with them or joins when they have pushed five
    deltas. Returns the most shards that it owned or backed up, each half second of two and a half minutes, the seconds
    of the others' longest pushes, and the refused deltas."""
    seed = 6
    print(f"seed {seed}")

    async def main() -> tuple[list[int], list[float], int]:
        settings = {"training.min_nodes": NODES - joins_late}
        swarm = Swarm(seed=seed, settings=settings, make_trainer=RestingTrainer, delay=(0.03, 0.0315))
        for number in range(NODES):
            swarm.network.line(f"10.0.0.{number + 2}", RATE if number == NODES - 1 else 25 * MBIT)
        hosts = swarm.start_many(NODES - joins_late)
        if joins_late:
            await swarm.until(
                lambda: all(host.living.progress.step >= 5 for host in hosts), within_s=240.0, what="they train"
            )
            hosts.append(swarm.start(f"n{NODES - 1}", bootstrap="n0"))
        await swarm.until(
            lambda: all(trainer_of(host).notes for host in hosts), within_s=120.0, what="all train", every_s=0.5
        )
        most = []
        for _ in range(300):
            await asyncio.sleep(0.5)
            most.append(max(shards_of(hosts[-1], hosts)))
        refused = sum(host.exchange.counters.refused for host in hosts if host.exchange is not None)
        pushes = [max(row.get("push_seconds", 0.0) for row in host.living.progress.steps) for host in hosts[:-1]]
        await swarm.stop()
        return most, pushes, refused

    return VirtualLoop().run(main(), limit_s=900, strict=False)


@pytest.mark.parametrize("joins_late", [True, *more(False)])
def test_a_slow_node_beside_fast_ones_holds_nobody_up(*, joins_late: bool) -> None:
    """It has its share at first, or when its pushes have shown that its line keeps up, and keeps it while the line is
    not full. What the others push to it takes a third of a step at most; nothing is refused."""
    most, pushes, refused = share_of_a_slow_node(joins_late=joins_late)
    print(most[::20], pushes)

    assert max(most) > SHARDS // 8
    assert max(pushes) <= STEP_S / 3
    assert refused == 0
