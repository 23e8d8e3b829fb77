"""Whole nodes on the simulated network that draw records from a master, and what each of them trained.

The data set has no files: a table of chunks that every node has. The trainer is a stub that draws records over the
same messages as a real one, some ahead of its training, and logs them when it reports a turn.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock

from p2pnode.training.dispatch.answers import QueueRules
from p2pnode.training.dispatch.chunks import ChunkTable, DatasetChunk, LocalDataset
from p2pnode.training.dispatch.master import MasterService
from p2pnode.training.trainer_link.interface import Resume, StepOrder, StepReport, TrainerHello
from p2pnode.training.trainer_link.record_messages import (
    RecordsGranted,
    RecordsOpened,
    RecordsTrained,
    RecordsUnreadable,
    RecordsWanted,
    RecordTask,
    TaskTrained,
)
from tests.harness.environment.memory_store import MemoryStore, StoreContents
from tests.harness.swarms.simulated_swarm import play
from tests.harness.swarms.swarm import Host, Swarm
from tests.harness.trainers.stub_trainer import StubTrainer

#: (pass, task, place in the order of the task)
Place = tuple[int, int, int]
#: Records of one step.
BATCH = 4
FILE = "train.recordio"


def dataset(chunks: int, records: int, name: str = FILE) -> LocalDataset:
    """So many chunks of so many records, in one file."""
    table = ChunkTable(DatasetChunk(name, number, 100 * number, records) for number in range(chunks))
    return LocalDataset(table, {name: f"/data/{name}"})


class RecordTrainer(StubTrainer):
    """Trains `BATCH` records in a step. `trained` places are those of turns that were reported."""

    def __init__(self, name: str, step_s: float) -> None:
        super().__init__(name, 64, step_s=step_s)
        self.places: list[Place] = []
        #: The step that trained each of them.
        self.steps_of: list[int] = []
        #: Tasks that this trainer cannot read: task → whether its file is missing.
        self.cannot_read: dict[int, bool] = {}
        self.over = False
        self._number = 0
        self._task: RecordTask | None = None
        self._drawn = 0

    async def start(self, restore: str = "", *, resume: Resume | None = None) -> TrainerHello:
        hello = await super().start(restore, resume=resume)
        self._task = None
        self.send_to_daemon(RecordsOpened())
        return hello

    async def train(self, order: StepOrder) -> StepReport:
        drawn = await self._draw()
        report = await super().train(order)
        places = [(task.pass_number, task.task, place) for task, place in drawn]
        self.places += places
        self.steps_of += [order.step] * len(places)
        reached = {(task.task, task.attempt): place + 1 for task, place in drawn}
        trained = [TaskTrained(task, attempt, done) for (task, attempt), done in reached.items()]
        self.send_to_daemon(RecordsTrained(order.step, order.step, trained))
        return report

    async def _draw(self) -> list[tuple[RecordTask, int]]:
        drawn: list[tuple[RecordTask, int]] = []
        while len(drawn) < BATCH:
            task = self._task
            if task is None or self._drawn == task.records:
                granted = await self._ask(wait=not drawn)
                self.over = self.over or granted.is_over
                if granted.task is None:
                    if drawn:
                        return drawn
                    await asyncio.sleep(0.1)
                    continue
                self._task, self._drawn = granted.task, granted.task.skip
                if granted.task.task in self.cannot_read:
                    self._give_up(granted.task)
                continue
            drawn.append((task, self._drawn))
            self._drawn += 1
        return drawn

    def _give_up(self, task: RecordTask) -> None:
        missing = self.cannot_read[task.task]
        self.send_to_daemon(RecordsUnreadable(task.task, task.attempt, "cannot be read (stub)", missing))
        self._task = None

    async def _ask(self, *, wait: bool) -> RecordsGranted:
        self._number += 1
        self.granted.clear()
        self.send_to_daemon(RecordsWanted(self._number, wait))
        while True:
            for message in self.granted:
                if isinstance(message, RecordsGranted) and message.number == self._number:
                    return message
            await asyncio.sleep(0.01)


class DispatchSwarm(Swarm):
    """Workers w0, w1, …; w0 founds. Masters share one store, which one of them holds for `lease_s` at a time."""

    def __init__(
        self, *, seed: int, files: LocalDataset, settings: dict[str, Any], lease_s: float, loss: float
    ) -> None:
        base = {"exchange.shards": 4, "barrier.method": "asp", "dispatch.source": "master", "dispatch.shuffle": True}
        speeds = [0.3, 0.5, 0.8]
        super().__init__(
            seed=seed,
            settings={**base, **settings},
            make_trainer=lambda name: RecordTrainer(name, speeds[sum(name.encode()) % 3]),
            loss=loss,
        )
        self.files = files
        #: What every trainer of every start has trained, those of killed nodes included.
        self.trainers: list[RecordTrainer] = []
        self.contents = contents = StoreContents()
        self.make_store = lambda _name: MemoryStore(contents, lease_s)
        self.read_dataset = lambda _name: self.files
        make = self._make_trainer

        def remember(name: str) -> StubTrainer:
            trainer = make(name)
            assert isinstance(trainer, RecordTrainer)
            self.trainers.append(trainer)
            return trainer

        self._make_trainer = remember

    def start_master(self, name: str) -> Host:
        return self.start(name, bootstrap="w0", node__role="master")

    async def kill_master(self, name: str) -> None:
        """As SIGKILL: the lock of its store stays until its lease has ended."""
        held_until = self.contents.held_until
        await self.kill(name)
        self.contents.held_until = held_until

    def master_of(self, name: str) -> MasterService:
        master = self.hosts[name].living.dispatch.master
        assert master is not None
        return master

    def trainer(self, name: str) -> RecordTrainer:
        trainer = self.hosts[name].trainer
        assert isinstance(trainer, RecordTrainer)
        return trainer

    def start_workers(self, count: int, **settings: Any) -> None:
        for number in range(count):
            self.start(f"w{number}", bootstrap="w0" if number else None, **settings)

    def counts(self) -> Counter[Place]:
        return Counter(place for trainer in self.trainers for place in trainer.places)

    async def until_ended(self, names: list[str], within_s: float) -> None:
        """Until these nodes have ended by themselves, because the job is done."""
        await self.until(
            lambda: all((task := self.hosts[name].task) is not None and task.done() for name in names),
            within_s=within_s,
            what="the end of the job",
        )


def simulate(
    scenario: Callable[[DispatchSwarm], Awaitable[None]],
    *,
    seed: int,
    chunks: int = 30,
    records: int = 5,
    loss: float = 0.0,
    lease_s: float = 3.0,
    limit_s: float = 3600,
    rules: QueueRules = MasterService.rules,
    chunks_per_task: int = 2,
    **settings: Any,
) -> DispatchSwarm:
    """Run a scenario; `settings` are of `[dispatch]`."""
    given = {"passes": 2, **settings}

    def make() -> DispatchSwarm:
        return DispatchSwarm(
            seed=seed,
            files=dataset(chunks, records),
            settings={f"dispatch.{key}": value for key, value in given.items()},
            lease_s=lease_s,
            loss=loss,
        )

    with mock.patch.multiple(MasterService, rules=rules, chunks_per_task=chunks_per_task):
        swarm = play(scenario, make, limit_s=limit_s)
    assert swarm.of("service_failed") == []
    return swarm


def every_place(passes: int, chunks: int = 30, records: int = 5, chunks_per_task: int = 2) -> Counter[Place]:
    """Every record of every pass, once."""
    return Counter(
        (number + 1, chunk // chunks_per_task, chunk % chunks_per_task * records + place)
        for number in range(passes)
        for chunk in range(chunks)
        for place in range(records)
    )
