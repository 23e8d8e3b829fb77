"""Whole nodes that share a data set, on the simulated network; the script is a list of what it draws and trains."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from p2pnode.status.events import EventRing
from p2pnode.status.report import LoopDelay, StatusReport
from p2pnode.training.trainer_link.data_messages import (
    Claim,
    DataGranted,
    DataOpened,
    DataShape,
    DataTrained,
    DataWanted,
    PartitionTrained,
)
from p2pnode.training.trainer_link.interface import StepOrder, StepReport
from tests.harness.swarms.simulated_swarm import play
from tests.harness.swarms.swarm import Swarm
from tests.harness.trainers.stub_trainer import StubTrainer

SAMPLES = 120
SHAPE = DataShape("samples", SAMPLES, 0)
#: Samples of one step, and claims drawn ahead of them.
BATCH, AHEAD = 4, 6


class Reader(StubTrainer):
    """A trainer whose script draws from a `swarm.sampler`, one sample in each partition, and trains four per step."""

    def __init__(self, name: str, step_s: float) -> None:
        super().__init__(name, 64, step_s=step_s)
        #: (epoch, sample) in the order of training; what a step had not reported when its node died is not in it.
        self.samples_trained: list[tuple[int, int]] = []
        self.waited_s = 0.0
        self._number = 0
        self._finished = False
        self._begins = True
        self._drawn: list[Claim] = []
        self._is_open = False

    async def train(self, order: StepOrder) -> StepReport:
        if not self._is_open:
            self._is_open = True
            self.send_to_daemon(DataOpened(SHAPE, None))
        while len(self._drawn) < BATCH + AHEAD:
            granted = await self._ask()
            self._drawn += granted.claims
            self._begins = self._finished = not granted.claims
        report = await super().train(order)
        batch, self._drawn = self._drawn[:BATCH], self._drawn[BATCH:]
        self.samples_trained += [(claim.epoch, claim.partition) for claim in batch if claim.counted]
        trained = [PartitionTrained(claim.epoch, claim.partition, 1, True) for claim in batch if claim.counted]
        self.send_to_daemon(DataTrained(order.step, trained, -1))
        return report

    async def _ask(self) -> DataGranted:
        self._number += 1
        began = asyncio.get_running_loop().time()
        self.send_to_daemon(DataWanted(self._number, self._begins, self._finished, 0, 4, bool(self._drawn)))
        while True:
            for message in self.granted:
                if isinstance(message, DataGranted) and message.number == self._number:
                    self.waited_s = max(self.waited_s, asyncio.get_running_loop().time() - began)
                    return message
            await asyncio.sleep(0.01)


def simulate(scenario: Callable[[Swarm], Awaitable[None]], *, seed: int, loss: float = 0.0) -> Swarm:
    """Run a scenario; node n2 is three times as slow as the others."""
    return play(
        scenario,
        lambda: Swarm(
            seed=seed,
            settings={"exchange.shards": 4, "barrier.method": "asp"},
            make_trainer=lambda name: Reader(name, 1.5 if name == "n2" else 0.5),
            loss=loss,
        ),
    )


def readers(swarm: Swarm) -> dict[str, Reader]:
    return {name: host.trainer for name, host in swarm.hosts.items() if isinstance(host.trainer, Reader)}


def complete_epochs(swarm: Swarm) -> int:
    """Epochs that every running node knows to be trained."""
    members = [host.living.data.member for host in swarm.running()]
    return min((0 if member is None else member.ledger.first[0]) for member in members)


def every_sample(epochs: int) -> list[tuple[int, int]]:
    return [(epoch, sample) for epoch in range(epochs) for sample in range(SAMPLES)]


def counts(swarm: Swarm, epochs: int) -> Counter[tuple[int, int]]:
    return Counter(place for reader in readers(swarm).values() for place in reader.samples_trained if place[0] < epochs)


def test_nodes_of_different_speed_share_every_epoch() -> None:
    """Three nodes train every sample of each epoch once; the slow one trains less, and nobody waits for long."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start_many(3)
        await swarm.until(lambda: complete_epochs(swarm) >= 3, within_s=600, what="three epochs")

    swarm = simulate(scenario, seed=21)

    found = counts(swarm, 3)
    assert found == Counter(dict.fromkeys(every_sample(3), 1))
    done = {name: len(reader.samples_trained) for name, reader in readers(swarm).items()}
    assert done["n2"] < min(done["n0"], done["n1"])
    assert max(reader.waited_s for reader in readers(swarm).values()) < 3.0
    assert swarm.of("data_member_silent") == []


@pytest.mark.promise(13)
def test_a_join_a_leave_and_a_death_in_the_middle_of_an_epoch() -> None:
    """Messages are lost, a node joins late, one leaves, one dies: no sample of an epoch is missing, and only what the
    dead one trained comes twice."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start_many(3)
        await asyncio.sleep(8.0)
        swarm.start("late", bootstrap="n0")
        await asyncio.sleep(6.0)
        leaver, trained = swarm.hosts["n1"], readers(swarm)["n1"].samples_trained
        before = len(trained)
        await swarm.until(
            lambda: len(trained) > before, within_s=5, what="a step that others have not heard of", every_s=0.01
        )
        leaver.living.leave()
        await leaver.task
        others = [host.living.data.member for host in swarm.running()]
        assert [place for place in trained for one in others if one is None or not one.ledger.is_trained(place)] == []
        await asyncio.sleep(4.0)
        await swarm.kill("n2")
        await swarm.until(lambda: complete_epochs(swarm) >= 4, within_s=900, what="four epochs")

    swarm = simulate(scenario, seed=22, loss=0.02)

    found = counts(swarm, 4)
    assert set(found) == set(every_sample(4))
    of_the_dead = set(readers(swarm)["n2"].samples_trained)
    assert {place for place, count in found.items() if count > 1} <= of_the_dead
    assert len(readers(swarm)["late"].samples_trained) > 20


def test_a_paused_node_holds_nobody_up() -> None:
    """The others train what it has not begun, epoch after epoch; when it resumes, nothing was trained twice."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start_many(3)
        await asyncio.sleep(6.0)
        paused = swarm.hosts["n1"].living
        paused.pause()
        await asyncio.sleep(2.0)
        assert paused.data.member is not None
        held = set(paused.data.member.begun)
        await asyncio.sleep(120.0)
        others = [host.living.data.member for host in swarm.running() if host.name != "n1"]
        missing = {
            place for place in every_sample(2) if any(one is None or not one.ledger.is_trained(place) for one in others)
        }
        assert missing == held != set()
        status = StatusReport(swarm.hosts["n0"].living, EventRing(), LoopDelay(swarm.clock), keys=list).status()
        assert status.data is not None
        assert (status.data.nodes, status.data.open_epoch, status.data.size) == (3, 0, SAMPLES)
        assert 0.9 < (status.data.trained or 0.0) < 1.0
        paused.resume()
        await swarm.until(lambda: complete_epochs(swarm) >= 2, within_s=600, what="two epochs")

    swarm = simulate(scenario, seed=25)

    assert counts(swarm, 2) == Counter(dict.fromkeys(every_sample(2), 1))


def test_fewer_samples_than_nodes_are_told() -> None:
    """A node says so when it has less data than there are nodes, and trains all the same."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start_many(3)
        await swarm.until(lambda: swarm.of("data_short") != [], within_s=60, what="the warning")
        steps = swarm.steps()
        await asyncio.sleep(5.0)
        assert all(host.living.progress.step > step for host, step in zip(swarm.running(), steps, strict=True))

    global SHAPE
    whole, SHAPE = SHAPE, DataShape("samples", 2, 0)
    try:
        swarm = simulate(scenario, seed=23)
    finally:
        SHAPE = whole

    assert swarm.of("data_short")[0].fields["reason"].startswith("3 nodes share 2 samples")


def test_nodes_with_other_data_are_told() -> None:
    """Two nodes with data of different lengths train their own, and each logs the other's."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start_many(2)
        await swarm.until(lambda: len(swarm.of("data_differs")) >= 2, within_s=60, what="both warnings")

    shapes = iter([DataShape("samples", 50, 0), DataShape("samples", 60, 0)])
    swarm_settings = Reader.train

    async def train(self: Reader, order: StepOrder) -> StepReport:
        if not self._is_open:
            self._is_open = True
            self.send_to_daemon(DataOpened(next(shapes), None))
        return await swarm_settings(self, order)

    Reader.train = train
    try:
        swarm = simulate(scenario, seed=24)
    finally:
        Reader.train = swarm_settings

    reasons = sorted(record.fields["reason"].partition(" ")[2] for record in swarm.of("data_differs"))
    assert reasons == [
        f"has other data ({theirs} samples, seed 0) than this node ({ours} samples, seed 0): they share nothing"
        for theirs, ours in ((50, 60), (60, 50))
    ]
