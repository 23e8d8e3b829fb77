"""Masters on one etcd, in memory and virtual time: lost, late and repeated requests, partitions, kills, clocks.

Each history has three masters that campaign, of which some are killed or cut off, and workers that repeat each request
to whoever serves until they have an answer. Every answer is checked at the end against what the store then has.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest

from p2pnode.training.dispatch.answers import Answer, Cause, End, QueueEvent, QueueRules, Registration, ReportAnswer
from p2pnode.training.dispatch.chunks import ChunkTable, DatasetChunk
from p2pnode.training.dispatch.etcd_store import EtcdStore
from p2pnode.training.dispatch.store import StoreLost, StoreRefused
from p2pnode.training.dispatch.stored_queue import StoredQueue
from tests.harness.environment.simulated import SeededEntropy, make_environment
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.long_run import more
from tests.harness.runner.stories import run_by
from tests.harness.stubs.fake_etcd import FakeCalls, FakeEtcd
from tests.harness.swarms.dispatch_swarm import DispatchSwarm, every_place, simulate

TASKS, PASSES = 100, 3
TABLE = ChunkTable(DatasetChunk("data", index, 100 * index, 5) for index in range(2 * TASKS))
WANTED = Registration(identity=b"i" * 16, digest=b"", tasks=0, chunks_per_task=2, shuffle=True, seed=3)
RULES = QueueRules(passes=PASSES, lease_floor_s=5, lease_ceiling_s=40, max_failures=200, max_losses=200)


class Master:
    """One master: campaigns, serves, and campaigns again when it lost the store."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.calls = FakeCalls(world.etcd, seed=world.seed * 10 + number, faults=world.faults)
        self.serving: StoredQueue | None = None
        self.task = asyncio.create_task(self._live())

    async def _live(self) -> None:
        starts = 0
        while True:
            starts += 1
            environment = make_environment(entropy=SeededEntropy(f"{self.world.seed}/{self.number}/{starts}"))
            store = EtcdStore(self.calls, "/test", f"master {self.number}", environment, 6.0)
            queue = StoredQueue(store, RULES, environment, self.world.events.append)
            try:
                await queue.open()
                self.serving = queue
                await queue.lost()
            except StoreLost:
                pass
            finally:
                self.serving = None
                await queue.close()

    async def kill(self) -> None:
        """As SIGKILL does: nothing is released."""
        queue, self.serving = self.serving, None
        self.task.cancel()
        self.calls.cut = True
        with contextlib.suppress(asyncio.CancelledError):
            await self.task
        if queue is not None:
            await queue.close()
        self.calls.cut = False
        self.task = asyncio.create_task(self._live())


class World:
    def __init__(self, seed: int, faults: float) -> None:
        self.seed = seed
        self.faults = faults
        self.random = random.Random(seed)
        self.etcd = FakeEtcd()
        self.events: list[QueueEvent] = []
        #: (pass, task) → the attempts that were answered as finished.
        self.accepted: dict[tuple[int, int], set[int]] = {}
        self.masters = [Master(self, number) for number in range(3)]

    async def ask(self, request: str, *arguments: Any) -> Any:
        """Repeat a request to the masters that believe to serve, until one answers."""
        while True:
            for master in self.masters:
                if master.task.done():
                    master.task.result()
            serving = [master.serving for master in self.masters if master.serving is not None]
            if serving:
                with contextlib.suppress(StoreLost, StoreRefused, TimeoutError):
                    async with asyncio.timeout(3):
                        return await getattr(self.random.choice(serving), request)(*arguments)
            await asyncio.sleep(0.2)

    async def work(self, name: bytes) -> None:
        await self.ask("register", TABLE, WANTED)
        while True:
            handout = await self.ask("get", name)
            if handout.answer is Answer.JOB_DONE:
                return
            if handout.lease is None:
                assert handout.answer is Answer.NO_TASK_NOW, handout
                await asyncio.sleep(handout.retry_after_s)
                continue
            lease = handout.lease
            await asyncio.sleep(self.random.uniform(0.1, 8.0))
            chance = self.random.random()
            if chance < 0.05:
                continue  # the worker forgets what it had, as one that restarts under its name
            if chance < 0.15:
                answer = await self.ask("fail", name, lease.task, lease.attempt, Cause.ERROR)
                assert answer is ReportAnswer.RETURNED
                continue
            answer = await self.ask("finish", name, lease.task, lease.attempt)
            assert answer in (ReportAnswer.ACCEPTED, ReportAnswer.SUPERSEDED)
            if answer is ReportAnswer.ACCEPTED:
                self.accepted.setdefault((lease.pass_number, lease.task), set()).add(lease.attempt)

    async def disturb(self) -> None:
        while True:
            await asyncio.sleep(self.random.uniform(1, 12))
            master = self.random.choice(self.masters)
            if self.random.random() < 0.5:
                await master.kill()
            else:
                master.calls.cut = True
                await asyncio.sleep(self.random.uniform(0.5, 12))
                master.calls.cut = False


@pytest.mark.parametrize("seed", [0, 1])
@run_by(run, limit_s=5_000)
async def test_every_task_counts_once_per_pass_whatever_happens_to_masters_and_etcd(seed: int) -> None:
    """All passes end; each task is finished by exactly one attempt per pass; the last state says the same."""
    world = World(seed, faults=0.15)
    trouble = asyncio.create_task(world.disturb())
    async with asyncio.TaskGroup() as workers:
        for name in (b"a", b"b", b"c", b"d"):
            workers.create_task(world.work(name))
    trouble.cancel()
    for master in world.masters:
        master.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await master.task

    environment = make_environment(entropy=SeededEntropy("last"))
    queue = StoredQueue(EtcdStore(FakeCalls(world.etcd), "/test", "last", environment, 6.0), RULES, environment, print)
    await queue.open()
    status = queue.status()
    assert (status.pass_number, status.end) == (PASSES, End.DONE)
    assert (status.todo, status.leased, status.done, status.failed) == (0, 0, TASKS, 0)
    await queue.close()
    assert set(world.accepted) == {(number, task) for number in range(1, PASSES + 1) for task in range(TASKS)}
    assert {len(attempts) for attempts in world.accepted.values()} == {1}
    fences = [fence for fence, _ in world.etcd.landed]
    assert fences == sorted(fences), "a former master wrote after its successor"
    assert len(set(fences)) > 3


class Kills:
    """Whole nodes: workers and masters are killed at random moments, and start again soon or after their death was
    found. Masters keep the queue in etcd, with lost, late and doubled answers, and are cut off from it now and then."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(f"{seed}/kills")
        self.etcd = FakeEtcd()
        self.calls: dict[str, FakeCalls] = {}
        self.starts = 0
        self.count = 0

    def store(self, name: str) -> EtcdStore:
        self.starts += 1
        self.calls[name] = FakeCalls(self.etcd, seed=self.seed * 1000 + self.starts, faults=0.1)
        environment = make_environment(entropy=SeededEntropy(f"{self.seed}/{name}/{self.starts}"))
        return EtcdStore(self.calls[name], "/test", name, environment, 4.0)

    async def play(self, swarm: DispatchSwarm) -> None:
        swarm.make_store = self.store
        swarm.start_workers(4)
        for name in ("m0", "m1"):
            swarm.start_master(name)
        await swarm.until(lambda: swarm.counts().total() > 8, within_s=300, what="some training")
        while not self.has_ended(swarm):
            await asyncio.sleep(self.random.uniform(0.3, 6.0))
            if self.random.random() < 0.5:
                await self.disturb_master(swarm, self.random.choice(["m0", "m1"]))
            elif all(swarm.hosts[f"w{number}"].exchange is not None for number in range(4)):
                await self.kill(swarm, self.random.choice(["w1", "w2", "w3"]), [(0.05, 1.0), (8.0, 12.0)])
        await swarm.until_ended(["w0"], 900)

    async def disturb_master(self, swarm: DispatchSwarm, name: str) -> None:
        self.calls[name].cut = True
        if self.random.random() < 0.7:
            await self.kill(swarm, name, [(0.1, 4.0)])
        else:
            await asyncio.sleep(self.random.uniform(0.5, 10.0))
            self.calls[name].cut = False

    async def kill(self, swarm: DispatchSwarm, name: str, pauses_s: list[tuple[float, float]]) -> None:
        await swarm.kill(name)
        self.count += 1
        await asyncio.sleep(self.random.uniform(*self.random.choice(pauses_s)))
        if name.startswith("m"):
            swarm.start_master(name)
        elif not self.has_ended(swarm):
            swarm.start(name, bootstrap="w0")

    @staticmethod
    def has_ended(swarm: DispatchSwarm) -> bool:
        return any(host.task is not None and host.task.done() for host in swarm.hosts.values())


@pytest.mark.parametrize("seed", [13, *more(11)])
@pytest.mark.promise(14)
def test_every_record_is_trained_whoever_is_killed_and_whatever_etcd_loses(
    seed: int,
) -> None:
    """What any trainer had trained when it was killed is known here: no record of any pass is in no trainer's."""
    kills = Kills(seed)
    swarm = simulate(kills.play, seed=seed, loss=0.02, passes=5, rules=QueueRules(lease_floor_s=10.0))

    found, expected = swarm.counts(), every_place(5)
    print(f"{kills.count} kills; {found.total() - expected.total()} of {expected.total()} records twice")
    assert found.keys() == expected.keys()
    assert kills.count >= 3
