"""A node's part in the work that a master dispatches: draws tasks for its trainer, and reports what is trained.

It asks for the next task before the present one ends, renews its leases while its trainer works, and reports a task as
finished when all its records are trained *and* the steps that trained them are counted (`training.dispatch.held`).
The position is written to the state directory after each step, so that a daemon that starts again goes on in the tasks
whose leases still stand. It does nothing until the trainer opens its records.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.supervision import logged, supervised
from p2pnode.training.dispatch.answers import MAX_AVOIDED, Answer, Cause, Held, ReportAnswer
from p2pnode.training.dispatch.chunks import BadDataset, LocalDataset, RecordFilesMissing
from p2pnode.training.dispatch.client import MasterClient, Trouble
from p2pnode.training.dispatch.held import HeldTask, HeldTasks, Key
from p2pnode.training.dispatch.messages import (
    DatasetTold,
    EndTask,
    GetTask,
    QueueCounts,
    RegisterDataset,
    RenewTasks,
    ReportDataset,
    ReportsTold,
    TaskTold,
)
from p2pnode.training.trainer_link.interface import Trainer
from p2pnode.training.trainer_link.record_messages import (
    RecordsFromTrainer,
    RecordsGranted,
    RecordsOpened,
    RecordsTrained,
    RecordsUnreadable,
    RecordsWanted,
    RecordTask,
)

#: Tasks that wait for the trainer beside the one that it draws from.
AHEAD = 1
#: A lease is renewed after this share of its length; and when more of its task is trained, so often at most.
RENEWED_SHARE = 1 / 3
PROGRESS_S = 2.0
#: Even a long lease is renewed so often: a master that took over learns by that which workers live.
MAX_RENEWAL_S = 8.0
#: The position is written at most so often.
SAVE_S = 0.2
#: Files that are missing here or differ are looked at again.
RESCAN_S = 10.0
#: The tasks that this node holds, and how far they are trained, in the state directory.
STATE_FILE = "dispatch.json"


class SavedPosition(msgspec.Struct, frozen=True, kw_only=True):
    """`dispatch.json`: the tasks that this node holds of the queue `identity`."""

    schema: int = 1
    identity: bytes
    tasks: list[HeldTask]


@dataclass(frozen=True, slots=True)
class RecordsFacts:
    """What a worker shows of itself. `counts`: the queue as the master last told of it. `refused`: why this node gets
    no tasks, and what to do."""

    counts: QueueCounts | None
    master: bytes | None
    trouble: Trouble | None
    refused: tuple[str, str] | None
    held: int
    trained: int
    finished: int
    superseded: int
    ended: bool


class RecordsService:
    """One node's records. `read_dataset` blocks, and raises `RecordFilesMissing` or `BadDataset`."""

    def __init__(
        self,
        client: MasterClient,
        trainer: Trainer,
        read_dataset: Callable[[], LocalDataset],
        environment: Environment,
    ) -> None:
        self.client = client
        self.held = HeldTasks()
        #: The queue as the master last told of it.
        self.counts: QueueCounts | None = None
        #: Why this node gets no tasks, and what to do; empty: it does.
        self.refused: tuple[str, str] | None = None
        #: The job has ended, and this node has reported all it had.
        self.over = asyncio.Event()
        self.ended: Answer | None = None
        self.trained = self.finished = self.superseded = 0
        self._trainer = trainer
        self._read_dataset = read_dataset
        self._clock = environment.clock
        self._disk = environment.disk
        self._executor = environment.executor
        self._log = environment.log
        self._genesis = b""
        self._identity = b""
        self._paths: Mapping[str, str] = {}
        self._wanted: RecordsWanted | None = None
        self._has_none_now = False
        self._avoid: dict[int, None] = {}
        self._reports: dict[Key, EndTask] = {}
        self._opened = asyncio.Event()
        self._wake_fetch = asyncio.Event()
        self._wake_report = asyncio.Event()
        self._wake_save = asyncio.Event()
        self._report_answered = asyncio.Event()
        self._has_left = False
        self._tasks: list[asyncio.Task[None]] = []

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self, genesis: bytes) -> None:
        """The node has entered the swarm with this genesis."""
        self._genesis = genesis
        for service in (self._fetch, self._report, self._renew, self._save):
            runs = supervised(f"records{service.__name__}", service, logged(self._log))
            self._tasks.append(asyncio.create_task(runs, name="dispatch"))

    async def stop(self) -> None:
        """Cancel all tasks; idempotent."""
        self._wanted = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def leave(self, timeout_s: float) -> None:
        """Give the tasks back, with what is trained of them; this node takes no more."""
        if self._has_left or not self._opened.is_set():
            return
        self._has_left = True
        for one in self.held.give_back():
            self._end(one, Cause.RELEASE)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._reports:
                    self._report_answered.clear()
                    await self._report_answered.wait()
        await self._write_position()

    def facts(self) -> RecordsFacts:
        return RecordsFacts(
            self.counts,
            self.client.master,
            self.client.trouble,
            self.refused,
            len(self.held),
            self.trained,
            self.finished,
            self.superseded,
            self.ended is not None,
        )

    # -- the trainer ---------------------------------------------------------------------------------------------

    def on_trainer(self, message: RecordsFromTrainer) -> None:
        """What the trainer has sent."""
        match message:
            case RecordsOpened():
                self.held.reopen()
                self._wanted = None
                self._opened.set()
            case RecordsWanted():
                self._wanted = message
                self._serve()
                self._wake_fetch.set()
            case RecordsTrained():
                self.held.report(message.step, message.trained)
            case RecordsUnreadable():
                self._on_unreadable(message)

    def _serve(self) -> None:
        """Answer the trainer, if there is an answer."""
        wanted = self._wanted
        if wanted is None:
            return
        task = None if self._has_left else self.held.draw()
        is_over = task is None and self.ended is not None
        if task is None and not is_over and (wanted.wait or not self._has_none_now):
            return
        self._wanted = None
        self._trainer.send_data(RecordsGranted(wanted.number, task, is_over))
        self._wake_fetch.set()

    def _on_unreadable(self, message: RecordsUnreadable) -> None:
        key = (message.task, message.attempt)
        held = self.held.remove(key)
        if held is None:
            return
        cause = Cause.MISSING if message.missing else Cause.ERROR
        if message.missing:
            self._avoid.pop(message.task, None)
            self._avoid[message.task] = None
            while len(self._avoid) > MAX_AVOIDED:
                del self._avoid[next(iter(self._avoid))]
        self._log.error("dispatch_task_failed", task=message.task, cause=str(cause), reason=message.reason)
        self._end(held, cause)
        self._wake_fetch.set()

    # -- steps ---------------------------------------------------------------------------------------------------

    def abandon(self, step: int) -> None:
        """The trainer of this step crashed; see `HeldTasks.abandon`."""
        self.held.abandon(step)

    def count(self, step: int) -> None:
        """This step is pushed and counted: what it trained is trained."""
        before = sum(one.trained for one in self.held.held())
        finished = self.held.count(step)
        after = sum(one.trained for one in self.held.held()) + sum(one.trained for one in finished)
        self.trained += after - before
        for one in finished:
            self._end(one)
        if after != before:
            self._wake_save.set()

    def drop(self, step: int) -> None:
        """The delta of this step is pushed by nobody."""
        for one in self.held.drop(step):
            self._end(one, Cause.RELEASE)

    def _end(self, held: Held, cause: Cause | None = None) -> None:
        """Report a task that is held no longer: as finished, or given back for this cause."""
        self._reports[held.task, held.attempt] = EndTask(self._identity, held.task, held.attempt, cause, held.trained)
        self._wake_report.set()
        self._wake_save.set()

    # -- the master ----------------------------------------------------------------------------------------------

    async def _fetch(self) -> None:
        """Agree on the data set, and keep a task ahead of the trainer until the job ends."""
        await self._opened.wait()
        await self._agree()
        while True:
            self._wake_fetch.clear()
            wait_s: float | None = None
            if not self._has_left and self.held.waiting < AHEAD:
                wait_s = await self._fetch_one()
            if self.ended is not None:
                self._serve()
                if not self.held.held() and not self._reports:
                    self.over.set()
                wait_s = None
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake_fetch.wait()
            except TimeoutError:
                continue

    async def _fetch_one(self) -> float | None:
        """Ask for a task; returns the seconds to wait before the next request, None: until something happens."""
        told = await self.client.ask(self._genesis, GetTask(self._identity, self._known(), list(self._avoid)), TaskTold)
        self._note(told.counts)
        self._has_none_now = told.answer != Answer.TASK
        if told.task is not None and told.answer == Answer.TASK:
            self._accept(told.task, told.lease_s)
            return 0.0
        if told.answer == Answer.NO_DATASET:
            await self._agree()
            return 0.0
        if told.answer in (Answer.JOB_DONE, Answer.ALL_FAILED):
            if self.ended is None:
                self._log.info("dispatch_ended", answer=str(told.answer))
            self.ended = told.answer
            return None
        self._serve()
        return max(told.retry_after_s, 0.05)

    def _note(self, counts: QueueCounts | None) -> None:
        """Take over the counts; what could not be read is tried again in each pass: the file may be back."""
        if counts is None:
            return
        if self.counts is not None and counts.queue.pass_number != self.counts.queue.pass_number:
            self._avoid.clear()
        self.counts = counts

    def _accept(self, granted: RecordTask, lease_s: float) -> None:
        """A task was granted. Its files are those of this node: both have agreed on the data set."""
        key = (granted.task, granted.attempt)
        if key in self._reports or self._has_left:
            return
        if granted.skip >= granted.records:
            self._end(Held(*key))  # its last attempt trained all of it, and could not say so
            return
        chunks = [msgspec.structs.replace(one, path=self._paths[one.path]) for one in granted.chunks]
        self.held.add(msgspec.structs.replace(granted, chunks=chunks), lease_s)
        self._wake_save.set()
        self._serve()

    def _known(self) -> list[Held]:
        """What this node has of the queue, with what it has not been able to report yet."""
        return [*self.held.held(), *(Held(task, attempt) for task, attempt in self._reports)]

    async def _agree(self) -> None:
        """Report this machine's files until the master has the same."""
        while True:
            try:
                dataset = await self._executor.run(self._read_dataset)
                files = await self._executor.run(dataset.table.summary)
            except (RecordFilesMissing, BadDataset) as error:
                hint = error.hint if isinstance(error, RecordFilesMissing) else "see dispatch.records"
                self._refuse(str(error), hint)
            else:
                told = await self._told(dataset, ReportDataset(files))
                if not told.refused:
                    self._paths = dataset.paths
                    self.refused = None
                    await self._take_over(told.identity)
                    return
                self._refuse(
                    told.refused,
                    "give all nodes the same files and dispatch.records; see docs/dispatch.md",
                )
            await asyncio.sleep(RESCAN_S)

    async def _told(self, dataset: LocalDataset, report: ReportDataset) -> DatasetTold:
        told = await self.client.ask(self._genesis, report, DatasetTold)
        if not told.is_wanted:
            return told
        table = await self._executor.run(dataset.table.encode)
        return await self.client.ask(self._genesis, RegisterDataset(table), DatasetTold)

    def _refuse(self, what: str, hint: str) -> None:
        if self.refused != (what, hint):
            self.refused = what, hint
            self._log.error("dispatch_refused", reason=what, hint=hint)

    async def _take_over(self, identity: bytes) -> None:
        """Go on with what an earlier start of this node had, if the queue is the same."""
        if identity != self._identity:
            self.held.give_back()
            self._reports.clear()
            self._avoid.clear()
            self._report_answered.set()
        first, self._identity = not self._identity, identity
        saved = await self._read_position() if first else []
        known = [one.state for one in saved]
        if not known:
            return
        told = await self.client.ask(self._genesis, RenewTasks(self._identity, known), ReportsTold)
        for one, answer in zip(saved, told.answers, strict=False):
            stands = answer == ReportAnswer.RENEWED
            if stands:
                self.held.add(one.task, one.lease_s, one.counted)
            self._log.info(
                "dispatch_resumed" if stands else "dispatch_superseded", task=one.task.task, trained=one.counted
            )
            self.superseded += not stands
        for complete in self.held.count(0):  # one whose last step was counted just before the end
            self._end(complete)
        self._serve()

    async def _report(self) -> None:
        """Send what waits to be reported until it is answered."""
        while True:
            if not self._reports:  # some may be left after a fault
                await self._wake_report.wait()
            self._wake_report.clear()
            while self._reports:  # a node holds two or three tasks
                await self._report_one(*next(iter(self._reports.items())))
            self._wake_fetch.set()  # a task that is finished may begin the next pass

    async def _report_one(self, key: Key, report: EndTask) -> None:
        told = await self.client.ask(self._genesis, report, ReportsTold)
        self._reports.pop(key, None)
        self._report_answered.set()
        self._note(told.counts)
        answer = told.answers[0] if told.answers else ReportAnswer.UNKNOWN
        if answer == ReportAnswer.ACCEPTED:
            self.finished += 1
        elif answer != ReportAnswer.RETURNED:
            self.superseded += 1
            self._log.info("dispatch_superseded", task=key[0], attempt=key[1], answer=str(answer))

    async def _renew(self) -> None:
        """Renew the leases in time, and when more is trained."""
        renewed_s, renewed = 0.0, list[Held]()
        while True:
            lease_s = self.held.shortest_lease_s
            await asyncio.sleep(min(PROGRESS_S, max(0.1, (lease_s or PROGRESS_S) * RENEWED_SHARE / 2)))
            if not self.held.held() or self._trainer.state == "hung":
                continue
            now, known = self._clock.monotonic(), self.held.held()
            interval_s = min(MAX_RENEWAL_S, (self.held.shortest_lease_s or 0.0) * RENEWED_SHARE)
            if now - renewed_s < interval_s and known == renewed:
                continue
            told = await self.client.ask(self._genesis, RenewTasks(self._identity, known), ReportsTold)
            renewed_s, renewed = self._clock.monotonic(), known
            self._note(told.counts)
            for one, answer in zip(known, told.answers, strict=False):
                if answer != ReportAnswer.RENEWED and (one.task, one.attempt) in self.held:
                    self.held.remove((one.task, one.attempt))
                    self.superseded += 1
                    self._log.warning("dispatch_lease_lost", task=one.task, attempt=one.attempt, answer=str(answer))
                    self._wake_fetch.set()

    # -- the disk ------------------------------------------------------------------------------------------------

    async def _save(self) -> None:
        """Write the position after it has changed."""
        while True:
            await self._wake_save.wait()
            self._wake_save.clear()
            await self._write_position()
            await asyncio.sleep(SAVE_S)

    async def _write_position(self) -> None:
        """A fault is logged, and costs nothing but the position."""
        position = msgspec.json.encode(SavedPosition(identity=self._identity, tasks=self.held.tasks()))
        try:
            await self._executor.run(self._disk.write, STATE_FILE, position)
        except OSError as error:
            self._log.warning("dispatch_position_not_written", reason=str(error))

    async def _read_position(self) -> list[HeldTask]:
        """The tasks that an earlier start held of the same queue."""
        try:
            content = await self._executor.run(self._disk.read, STATE_FILE)
            saved = None if content is None else msgspec.json.decode(content, type=SavedPosition)
        except (OSError, msgspec.DecodeError) as error:
            self._log.warning("dispatch_position_not_read", reason=str(error))
            return []
        return saved.tasks if saved is not None and saved.identity == self._identity else []
