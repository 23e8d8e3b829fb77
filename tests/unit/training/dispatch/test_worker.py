"""A node's daemon between its trainer and the master: what it reports, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from p2pnode.training.dispatch.answers import Answer, End, Held, QueueStatus, ReportAnswer
from p2pnode.training.dispatch.chunks import DatasetChunk
from p2pnode.training.dispatch.messages import (
    DatasetTold,
    DispatchAnswer,
    DispatchRequest,
    EndTask,
    GetTask,
    QueueCounts,
    RenewTasks,
    ReportDataset,
    ReportsTold,
    TaskTold,
)
from p2pnode.training.dispatch.worker import RecordsService
from p2pnode.training.trainer_link.record_messages import (
    RecordsGranted,
    RecordsOpened,
    RecordsTrained,
    RecordsUnreadable,
    RecordsWanted,
    RecordTask,
    TaskTrained,
)
from tests.harness.environment.simulated import ListLog, MemoryDisk, make_environment
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import played_by
from tests.harness.swarms.dispatch_swarm import dataset

QUEUE = b"q" * 16


class Master:
    """Answers as a `MasterClient`. `silent` kinds of requests get no answer; `tasks` are granted in order."""

    trouble = None
    master = b"m" * 20

    def __init__(self) -> None:
        self.asked: list[DispatchRequest] = []
        self.silent: tuple[type, ...] = ()
        self.faults: dict[type, Exception] = {}
        self.tasks = [self.task(number) for number in range(1, 4)]
        self.renewed = ReportAnswer.RENEWED
        self.queue = QUEUE
        self.pass_number = 1

    @property
    def counts(self) -> QueueCounts:
        return QueueCounts(QueueStatus(self.pass_number, 2, 15, 0, 0, 0, 0, End.NO), 0, "sqlite")

    @staticmethod
    def task(number: int, name: str = "train.recordio", skip: int = 0) -> RecordTask:
        return RecordTask(number, 1, 1, 0, skip, [DatasetChunk(name, number, 100 * number, 5)])

    async def ask(self, genesis: bytes, request: DispatchRequest, kind: type) -> DispatchAnswer:
        self.asked.append(request)
        if isinstance(request, self.silent):
            await asyncio.Event().wait()
        if fault := self.faults.pop(type(request), None):
            raise fault
        match request:
            case ReportDataset():
                return DatasetTold(False, "", self.queue)
            case GetTask(identity) if identity != self.queue:
                return TaskTold(Answer.NO_DATASET, None, 0.0, 0.0, None)
            case GetTask():
                if self.tasks:
                    return TaskTold(Answer.TASK, self.tasks.pop(0), 30.0, 0.0, self.counts)
                return TaskTold(Answer.NO_TASK_NOW, None, 0.0, 1.0, self.counts)
            case EndTask():
                answer = ReportAnswer.ACCEPTED if request.cause is None else ReportAnswer.RETURNED
                return ReportsTold([answer], None)
            case RenewTasks(_, held):
                return ReportsTold([self.renewed for _ in held], None)
        raise AssertionError(request)

    def finished(self) -> list[int]:
        return [one.task for one in self.of(EndTask) if one.cause is None]

    def failed(self) -> list[tuple[int, str, int]]:
        return [(one.task, one.cause, one.trained) for one in self.of(EndTask) if one.cause is not None]

    def of(self, kind: type) -> list[Any]:
        return [request for request in self.asked if isinstance(request, kind)]


class Trainer:
    state = "running"

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send_data(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def granted(self) -> list[tuple[int, int] | None]:
        answers = [message for message in self.sent if isinstance(message, RecordsGranted)]
        return [None if one.task is None else (one.task.task, one.task.skip) for one in answers]


class Bench:
    def __init__(self, disk: MemoryDisk | None = None) -> None:
        self.master, self.trainer = Master(), Trainer()
        self.log = ListLog([], "n", None)  # type: ignore[arg-type]
        self.disk = disk or MemoryDisk()
        environment = make_environment(disk=self.disk, log=self.log)
        self.service = RecordsService(self.master, self.trainer, lambda: dataset(30, 5), environment)  # type: ignore[arg-type]

    async def begin(self, *, opens: bool) -> None:
        self.service.start(b"g" * 16)
        if opens:
            self.service.on_trainer(RecordsOpened())
        await asyncio.sleep(0.1)

    async def want(self, number: int, *, wait: bool = True) -> None:
        self.service.on_trainer(RecordsWanted(number, wait))
        await asyncio.sleep(0.1)

    def trained(self, step: int, task: int, records: int) -> None:
        self.service.on_trainer(RecordsTrained(step, step, [TaskTrained(task, 1, records)]))


def played(
    scenario: Callable[[Bench], Any], disk: MemoryDisk | None = None, *, opens: bool = True, queue: bytes = QUEUE
) -> Bench:
    async def main() -> Bench:
        bench = Bench(disk)
        bench.master.queue = queue
        await bench.begin(opens=opens)
        try:
            await scenario(bench)
        finally:
            await bench.service.stop()
        return bench

    return run(main())


@played_by(played)
async def test_a_task_whose_report_is_not_answered_yet_is_still_named(bench: Bench) -> None:
    """Otherwise the master would take its lease for an answer that was lost, and grant it again."""
    bench.master.silent = (EndTask,)
    await bench.want(1)
    bench.trained(1, 1, 5)
    bench.service.count(1)
    await bench.want(2)
    assert bench.master.of(GetTask)[-1].held == [Held(2, 1, 0), Held(1, 1, 0)]


@played_by(played)
async def test_a_trainer_with_something_to_report_is_told_that_there_is_none_now(bench: Bench) -> None:
    """At once, where the master has said so."""
    bench.master.tasks.clear()
    await bench.want(1)
    assert bench.trainer.granted == [(1, 0)]
    await bench.want(2, wait=False)
    assert bench.trainer.granted == [(1, 0), None]


@played_by(played)
async def test_a_new_queue_has_no_tasks_to_avoid(bench: Bench) -> None:
    """Task numbers are those of one queue: the same number in the next one is another task."""
    await bench.want(1)
    bench.service.on_trainer(RecordsUnreadable(1, 1, "no file train.recordio here", missing=True))
    bench.master.queue = b"r" * 16
    await bench.want(2)
    await asyncio.sleep(5.0)
    assert [(one.identity, one.avoid) for one in bench.master.of(GetTask)][-1] == (b"r" * 16, [])


@played_by(played)
async def test_leaving_gives_tasks_back_with_what_is_counted(bench: Bench) -> None:
    """The next node begins there."""
    await bench.want(1)
    bench.trained(1, 1, 3)
    bench.service.count(1)
    await bench.service.leave(2.0)
    assert bench.master.failed() == [
        (1, "release", 3),
        (2, "release", 0),
    ]


def test_the_position_in_another_queue_is_none() -> None:
    """Another queue has other tasks of the same numbers."""
    disk = MemoryDisk()

    async def first(bench: Bench) -> None:
        await bench.want(1)
        bench.trained(1, 1, 3)
        bench.service.count(1)
        await asyncio.sleep(1.0)

    async def second(bench: Bench) -> None:
        await bench.want(1)
        assert bench.trainer.granted == [(1, 0)]
        assert bench.master.of(RenewTasks) == []

    played(first, disk)
    played(second, disk, queue=b"r" * 16)


@pytest.mark.parametrize("content", [b"", b"{", b'{"identity": "", "tasks": 3}', None])
def test_a_position_that_cannot_be_read_is_left_out(content: bytes | None) -> None:
    """Damaged, of another form, or not readable for this user: the node begins without it."""
    disk = MemoryDisk()
    disk.write("dispatch.json", content or b"")
    if content is None:
        disk.unreadable.add("dispatch.json")

    async def scenario(bench: Bench) -> None:
        await bench.want(1)
        assert bench.trainer.granted == [(1, 0)]
        assert [one.event for one in bench.log.records] == ["dispatch_position_not_read"]

    played(scenario, disk)


def test_a_full_disk_costs_the_position_alone() -> None:
    """It is logged, and training goes on."""
    disk = MemoryDisk()
    disk.full = True

    async def scenario(bench: Bench) -> None:
        await bench.want(1)
        bench.trained(1, 1, 5)
        bench.service.count(1)
        await asyncio.sleep(1.0)
        assert bench.service.finished == 1
        assert {one.event for one in bench.log.records} == {"dispatch_position_not_written"}

    played(scenario, disk)


@pytest.mark.parametrize("kind", [ReportDataset, GetTask, EndTask, RenewTasks])
@played_by(played, opens=False)
async def test_what_had_a_fault_begins_again(bench: Bench, *, kind: type) -> None:
    """Whatever this node was about to ask, it asks again a moment later, and reports what it has trained."""
    bench.master.faults[kind] = KeyError(kind.__name__)
    bench.service.on_trainer(RecordsOpened())
    await bench.want(1)
    await asyncio.sleep(3.0)
    bench.trained(1, 1, 5)
    bench.service.count(1)
    await asyncio.sleep(60.0)

    assert bench.master.finished()[-1:] == [1]
    assert bench.service.finished == 1
    assert len(bench.master.of(kind)) > 1
    (record,) = [record for record in bench.log.records if record.event == "service_failed"]
    assert record.fields["error"] == f"KeyError({kind.__name__!r})"


@played_by(played)
async def test_a_lease_that_stands_no_more_is_not_reported(bench: Bench) -> None:
    """The trainer may go on with it: what it trains changes nothing any more."""
    await bench.want(1)
    bench.master.renewed = ReportAnswer.SUPERSEDED
    bench.trained(1, 1, 2)
    bench.service.count(1)
    await asyncio.sleep(5.0)
    assert bench.service.superseded >= 1
    bench.trained(2, 1, 5)
    bench.service.count(2)
    await asyncio.sleep(0.1)
    assert bench.master.finished() == []


@played_by(played)
async def test_a_file_that_is_not_here_is_given_back_and_avoided(bench: Bench) -> None:
    """The next request names the task, so that another node gets it; a new pass asks for it again."""
    await bench.want(1)
    bench.service.on_trainer(RecordsUnreadable(1, 1, "no file train.recordio here", missing=True))
    await bench.want(2)
    assert bench.master.failed() == [(1, "missing", 0)]
    assert bench.master.of(GetTask)[-1].avoid == [1]
    bench.master.pass_number = 2
    await bench.want(3)
    await asyncio.sleep(5.0)
    assert bench.master.of(GetTask)[-1].avoid == []
