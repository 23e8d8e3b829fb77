"""The task queue of a master, with its store: compute changes, write them, apply them, then answer.

Requests that arrive while the store writes wait and share the next entry (group commit): so the number of answers per
second does not depend on how long a durable write takes. Nothing is answered, and nothing shows in memory, before the
store has it. A failed write fails every request of its batch with `StoreRefused` and leaves the state as it was. When
the store is lost, every request fails with `StoreLost`, and this object serves no more.

The log is replaced by a snapshot when it has grown beyond both `LOG_BYTES` and the last snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from overlay.environment import Environment
from training.dispatch import changes as log
from training.dispatch.answers import (
    BadRequestToQueue,
    Cause,
    Handout,
    Held,
    QueueEvent,
    QueueRules,
    QueueStatus,
    Registration,
    ReportAnswer,
    SaveAnswer,
)
from training.dispatch.chunks import ChunkTable, DatasetDiffers, FileSummary, difference, digest_of
from training.dispatch.draft import Draft
from training.dispatch.queue import QueueImage, TaskQueue, decode_image, encode_image
from training.dispatch.store import Store, StoredQueueState, StoreLost, StoreRefused
from training.errors import TrainingError

R = TypeVar("R")

#: Requests in one entry, about two milliseconds on the event loop, and changed tasks: an entry stays far below
#: `MAX_ENTRY_BYTES`.
BATCH_REQUESTS, BATCH_CHANGES = 64, 4096
#: Requests that wait; more are refused, to be repeated later.
WAITING_REQUESTS = 20_000
LOG_BYTES, LOG_ENTRIES = 4 << 20, 20_000
#: The writer looks so often whether it still has the store, when nobody asks.
IDLE_S = 0.5


class StoredQueue:
    """One master's queue. `open` first; after `StoreLost`, `close` it and make another one.

    `events` is called for each event once it is stored, on the event loop.
    """

    def __init__(
        self, store: Store, rules: QueueRules, environment: Environment, events: Callable[[QueueEvent], None]
    ) -> None:
        self._store = store
        self._environment = environment
        self._events = events
        self._queue = TaskQueue(rules)
        self._table: ChunkTable | None = None
        self._summary: list[FileSummary] = []
        self._waiting: deque[tuple[Callable[[Draft], Any], asyncio.Future[Any]]] = deque()
        self._wake = asyncio.Event()
        self._registering = asyncio.Lock()
        self._lost: asyncio.Future[StoreLost] = asyncio.get_running_loop().create_future()
        self._writer: asyncio.Task[None] | None = None
        self._snapshot: asyncio.Task[None] | None = None
        self._log_bytes = self._log_entries = self._snapshot_bytes = 0
        #: Before the log has more entries than this, a snapshot that was refused is not tried again.
        self._refused_entries = 0
        self._now = 0.0

    # -- life ------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Become the writer of the store, and recover what it has. Leases of before run for their full time again.

        Raises `StoreHeld`, `StoreLost`, or `StateDamaged` and `DatasetDamaged` where the store has nonsense.
        """
        stored = await self._store.open()
        self._queue, self._table, self._summary = await self._environment.executor.run(
            recovered, self._queue.rules, stored
        )
        self._queue.rearm(self._clock())
        self._log_bytes = sum(map(len, stored.entries))
        self._log_entries = len(stored.entries)
        self._snapshot_bytes = len(stored.snapshot or b"")
        self._writer = asyncio.create_task(self._write(), name="dispatch-writer")
        await self._ask(lambda draft: draft.resume())

    async def close(self) -> None:
        """Stop, and give the store up to others. Requests that wait fail with `StoreLost`. Raises nothing."""
        self._lose(StoreLost("this master is closed"))
        for task in (self._writer, self._snapshot):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
        await self._store.close()

    async def lost(self) -> StoreLost:
        """Wait until the store is lost, and say why. From then on nothing is answered."""
        return await asyncio.shield(self._lost)

    @property
    def epoch(self) -> int:
        """The store's: the newest of several masters has the highest."""
        return self._store.epoch

    @property
    def registration(self) -> Registration | None:
        """The registered data set; None before."""
        return self._queue.registration

    @property
    def table(self) -> ChunkTable | None:
        """The chunks of the registered data set; None before."""
        return self._table

    def status(self) -> QueueStatus:
        """The counts as stored."""
        return self._queue.status()

    def holders(self) -> list[bytes]:
        """The workers that have leases."""
        return list(self._queue.held_by)

    # -- the data set ----------------------------------------------------------------------------------------------

    async def register(self, table: ChunkTable, wanted: Registration) -> Registration:
        """Register the data set; `wanted.digest` and `wanted.tasks` are overwritten by those of the table.

        The first registration counts and is the answer to later ones, whatever grouping and seed they name. Raises
        `DatasetDiffers`, which names the first difference, for other chunks.
        """
        summary = await self._environment.executor.run(table.summary)
        async with self._registering:
            if self._queue.registration is not None:
                return self.agree(summary)
            self._check()
            encoded = await self._environment.executor.run(table.encode)
            try:
                await self._store.write_chunks(encoded)
            except StoreLost as error:
                self._lose(error)
                raise
            facts = Registration(
                identity=wanted.identity,
                digest=digest_of(summary),
                tasks=table.tasks(wanted.chunks_per_task),
                chunks_per_task=wanted.chunks_per_task,
                shuffle=wanted.shuffle,
                seed=wanted.seed,
            )
            first = await self._ask(lambda draft: draft.register(facts))
            self._table, self._summary = table, summary
            return first

    def agree(self, summary: Sequence[FileSummary]) -> Registration:
        """The registration, to somebody with the same data set. Raises `DatasetDiffers`, and `BadRequestToQueue`
        before anything is registered."""
        self._check()
        first = self._queue.registration
        if first is None:
            raise BadRequestToQueue("no data set is registered yet")
        found = difference(self._summary, summary)
        if found:
            raise DatasetDiffers(f"this run has another data set registered: {found}. Give all nodes the same files")
        return first

    # -- requests --------------------------------------------------------------------------------------------------

    async def get(
        self, worker: bytes, held: Sequence[Held] = (), avoid: Sequence[int] = (), pass_number: int | None = None
    ) -> Handout:
        """`Draft.get`."""
        return await self._ask(lambda draft: draft.get(worker, held, avoid, pass_number))

    async def finish(self, worker: bytes, task: int, attempt: int) -> ReportAnswer:
        """`Draft.finish`."""
        return await self._ask(lambda draft: draft.finish(worker, task, attempt))

    async def fail(self, worker: bytes, task: int, attempt: int, cause: Cause, trained: int = 0) -> ReportAnswer:
        """`Draft.fail`."""
        self._check_trained(task, trained)
        return await self._ask(lambda draft: draft.fail(worker, task, attempt, cause, trained))

    async def renew(self, worker: bytes, held: Sequence[Held]) -> list[ReportAnswer]:
        """`Draft.renew`."""
        for one in held:
            self._check_trained(one.task, one.trained)
        return await self._ask(lambda draft: draft.renew(worker, held))

    async def worker_gone(self, worker: bytes) -> int:
        """`Draft.worker_gone`."""
        return await self._ask(lambda draft: draft.worker_gone(worker))

    async def discard(self, task: int, reason: str) -> bool:
        """`Draft.discard`."""
        return await self._ask(lambda draft: draft.discard(task, reason))

    async def expire(self) -> None:
        """End the leases that are due now. The writer does so by itself in time."""
        await self._ask(Draft.expire)

    async def request_save(self, holder: bytes, seconds: float) -> SaveAnswer:
        """`Draft.request_save`."""
        return await self._ask(lambda draft: draft.request_save(holder, seconds))

    async def release_save(self, holder: bytes, token: int) -> bool:
        """`Draft.release_save`."""
        return await self._ask(lambda draft: draft.release_save(holder, token))

    def _check_trained(self, task: int, trained: int) -> None:
        facts, table = self._queue.registration, self._table
        if facts is None or table is None or not 0 <= task < facts.tasks or not trained:
            return
        records = sum(chunk.records for chunk in table.of_task(task, facts.chunks_per_task))
        if trained > records:
            raise BadRequestToQueue(f"{trained} records trained of task {task}, which has {records}")

    # -- the writer ------------------------------------------------------------------------------------------------

    async def _ask(self, request: Callable[[Draft], R]) -> R:
        self._check()
        if len(self._waiting) >= WAITING_REQUESTS:
            raise StoreRefused(f"{WAITING_REQUESTS} requests wait already: the store is too slow, ask again later")
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        self._wake.set()
        return await answer

    def _check(self) -> None:
        """Raises `StoreLost` where nothing may be answered any more."""
        if self._lost.done():
            raise StoreLost(str(self._lost.result()))
        try:
            self._store.check()
        except StoreLost as error:
            self._lose(error)
            raise

    def _clock(self) -> float:
        self._now = max(self._now, self._environment.clock.monotonic())
        return self._now

    async def _write(self) -> None:
        try:
            while True:
                await self._idle()
                await self._batch()
                await self._compact()
        except StoreLost as error:
            self._lose(error)
        except Exception as error:  # a state that nobody foresaw must not be served
            self._environment.log.error("dispatch_writer_failed", error=repr(error))
            self._lose(StoreLost(f"the queue cannot go on: {error!r}"))

    async def _idle(self) -> None:
        deadline = self._queue.next_deadline()
        wait_s = IDLE_S if deadline is None else min(max(deadline - self._clock(), 0.0), IDLE_S)
        if not self._waiting:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
        self._store.check()

    async def _batch(self) -> None:
        """Answer the waiting requests by one entry of the log, and end the leases that are due.

        A report of the batch counts before the deadline of its lease: the master may have been stopped meanwhile.
        """
        draft = Draft(self._queue, self._clock())
        answers: list[tuple[asyncio.Future[Any], Any, TrainingError | None]] = []
        while self._waiting and len(answers) < BATCH_REQUESTS and draft.size < BATCH_CHANGES:
            request, answer = self._waiting.popleft()
            try:
                answers.append((answer, request(draft), None))
            except (BadRequestToQueue, DatasetDiffers) as error:
                answers.append((answer, None, error))
        draft.expire()
        entry = draft.changes()
        try:
            if entry:
                await self._append(log.encode(entry))
            self._store.check()
        except StoreRefused as error:
            answers = [(answer, None, StoreRefused(str(error))) for answer, _, _ in answers]
        except BaseException as error:
            lost = error if isinstance(error, StoreLost) else StoreLost(f"the write was cut short: {error!r}")
            _give([(answer, None, StoreLost(str(lost))) for answer, _, _ in answers])
            raise
        else:
            self._queue.apply(entry, draft.times, draft.save_until)
            for event in draft.events:
                self._events(event)
        _give(answers)

    async def _append(self, entry: bytes) -> None:
        await self._store.append(entry)
        self._log_bytes += len(entry)
        self._log_entries += 1

    async def _compact(self) -> None:
        """Begin a snapshot where the log has become long. Requests wait for the copy, not for the rest."""
        is_large = self._log_bytes > max(LOG_BYTES, self._snapshot_bytes)
        long = is_large or self._log_entries > max(LOG_ENTRIES, self._refused_entries)
        if long and (self._snapshot is None or self._snapshot.done()):
            image = await self._environment.executor.run(self._queue.image)
            self._snapshot = asyncio.create_task(
                self._write_snapshot(image, self._log_entries, self._log_bytes), name="dispatch-snapshot"
            )

    async def _write_snapshot(self, image: QueueImage, entries: int, log_bytes: int) -> None:
        try:
            snapshot = await self._environment.executor.run(encode_image, image)
            await self._store.write_snapshot(snapshot, entries)
        except StoreLost as error:
            self._lose(error)
        except Exception as error:  # that of the store is `StoreRefused`; the log has everything, whatever it was
            reason = str(error) if isinstance(error, StoreRefused) else repr(error)
            self._environment.log.warning("dispatch_snapshot_refused", error=reason)
            # Tried again when the log has doubled.
            self._snapshot_bytes = max(2 * self._log_bytes, LOG_BYTES)
            self._refused_entries = 2 * self._log_entries
        else:
            self._snapshot_bytes = len(snapshot)
            self._refused_entries = 0
            self._log_entries -= entries
            self._log_bytes -= log_bytes

    def _lose(self, error: StoreLost) -> None:
        if not self._lost.done():
            self._lost.set_result(error)
        waiting, self._waiting = self._waiting, deque()
        _give([(answer, None, StoreLost(str(error))) for _, answer in waiting])
        self._wake.set()


def recovered(rules: QueueRules, stored: StoredQueueState) -> tuple[TaskQueue, ChunkTable | None, list[FileSummary]]:
    """The queue that a store has, with its chunks. Raises `StateDamaged` or `DatasetDamaged`."""
    queue = TaskQueue(rules)
    if stored.snapshot is not None:
        queue.restore(decode_image(stored.snapshot))
    for entry in stored.entries:
        queue.apply(log.decode(entry))
    facts = queue.registration
    if facts is None:
        return queue, None, []
    if stored.chunks is None:
        raise log.StateDamaged("a data set is registered, and its list of chunks is missing")
    table = ChunkTable.decode(stored.chunks)
    summary = table.summary()
    if digest_of(summary) != facts.digest or table.tasks(facts.chunks_per_task) != facts.tasks:
        raise log.StateDamaged("the stored list of chunks is not the registered one")
    return queue, table, summary


def _give(answers: Sequence[tuple[asyncio.Future[Any], Any, TrainingError | None]]) -> None:
    for answer, value, error in answers:
        if answer.done():
            continue
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)
