"""The task queue of a master, with its store: change the queue, write the rows, then answer.

Requests that arrive while the store writes wait and share the next write (group commit): so the number of answers per
second does not depend on how long a durable write takes. Nothing is answered, and nothing shows in `status`, before the
store has it. When a write fails, every request fails with `StoreLost`, and this object serves no more: another one
reads what the store has.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from p2pnode.overlay.environment import Environment
from p2pnode.training.dispatch.answers import (
    BadRequestToQueue,
    Cause,
    Handout,
    Held,
    QueueEvent,
    QueueRules,
    QueueStatus,
    Registration,
    ReportAnswer,
)
from p2pnode.training.dispatch.chunks import ChunkTable, DatasetDiffers, FileSummary, difference, digest_of
from p2pnode.training.dispatch.queue import TaskQueue
from p2pnode.training.dispatch.queue_rows import StateDamaged
from p2pnode.training.dispatch.store import Store, StoreLost, StoreRefused
from p2pnode.training.errors import TrainingError

R = TypeVar("R")

#: Requests in one write, about two milliseconds on the event loop, and the rows after which no more requests join it: a
#: request changes 64 rows at most, and leases that end by their time 16, so that a write stays below `MAX_ROWS`.
BATCH_REQUESTS, BATCH_ROWS = 64, 40
#: Requests that wait; more are refused, to be repeated later.
WAITING_REQUESTS = 20_000
#: The list of chunks is stored in rows of so many bytes, one in a write: etcd's JSON of one is coded in a millisecond.
PIECE_BYTES = 256 << 10
#: The writer looks so often whether it still has the store, and which leases are over, when nobody asks.
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
        self._now = 0.0
        self._queue = TaskQueue(rules, {}, 0.0)
        self._status = self._queue.status()
        self._table: ChunkTable | None = None
        self._summary: list[FileSummary] = []
        self._waiting: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._wake = asyncio.Event()
        self._registering = asyncio.Lock()
        self._lost: asyncio.Future[StoreLost] = asyncio.get_running_loop().create_future()
        self._writer: asyncio.Task[None] | None = None

    # -- life ------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Become the writer of the store, and recover what it has. Leases of before run for their full time again.

        Raises `StoreHeld`, `StoreLost`, or `StateDamaged` and `DatasetDamaged` where the store has nonsense.
        """
        rows = await self._store.open()
        self._queue, self._table, self._summary = await self._environment.executor.run(
            recovered, self._queue.rules, rows, self._clock()
        )
        self._writer = asyncio.create_task(self._write(), name="dispatch-writer")
        await self._ask(lambda: None)

    async def close(self) -> None:
        """Stop, and give the store up to others. Requests that wait fail with `StoreLost`. Raises nothing."""
        self._lose(StoreLost("this master is closed"))
        if self._writer is not None:
            self._writer.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._writer
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
        return None if self._table is None else self._queue.registration

    @property
    def table(self) -> ChunkTable | None:
        """The chunks of the registered data set; None before."""
        return self._table

    def status(self) -> QueueStatus:
        """The counts as stored."""
        return self._status

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
            if self._table is not None:
                return self.agree(summary)
            self._check()
            tasks = table.tasks(wanted.chunks_per_task)
            encoded = await self._environment.executor.run(table.encode)
            pieces = [encoded[at : at + PIECE_BYTES] for at in range(0, len(encoded), PIECE_BYTES)]
            for number, piece in enumerate(pieces):  # nothing refers to them before the registration
                await self._ask(partial(self._queue.keep, _piece(number), piece))
            facts = msgspec.structs.replace(wanted, digest=digest_of(summary), tasks=tasks, pieces=len(pieces))
            await self._ask(lambda: self._queue.register(facts))
            self._table, self._summary = table, summary
            return facts

    def agree(self, summary: Sequence[FileSummary]) -> Registration:
        """The registration, to somebody with the same data set. Raises `DatasetDiffers`, and `BadRequestToQueue`
        before anything is registered."""
        self._check()
        first = self.registration
        if first is None:
            raise BadRequestToQueue("no data set is registered yet")
        found = difference(self._summary, summary)
        if found:
            raise DatasetDiffers(f"this node's records differ from those of the run: {found}")
        return first

    # -- requests, each as that of `TaskQueue` ---------------------------------------------------------------------

    async def get(self, worker: bytes, held: Sequence[Held] = (), avoid: Sequence[int] = ()) -> Handout:
        return await self._ask(lambda: self._queue.get(worker, held, avoid))

    async def finish(self, worker: bytes, task: int, attempt: int) -> ReportAnswer:
        return await self._ask(lambda: self._queue.finish(worker, task, attempt))

    async def fail(self, worker: bytes, task: int, attempt: int, cause: Cause, trained: int = 0) -> ReportAnswer:
        self._check_trained(task, trained)
        return await self._ask(lambda: self._queue.fail(worker, task, attempt, cause, trained))

    async def renew(self, worker: bytes, held: Sequence[Held]) -> list[ReportAnswer]:
        for one in held:
            self._check_trained(one.task, one.trained)
        return await self._ask(lambda: self._queue.renew(worker, held))

    async def worker_gone(self, worker: bytes) -> int:
        return await self._ask(lambda: self._queue.worker_gone(worker))

    async def discard(self, task: int, reason: str) -> bool:
        return await self._ask(lambda: self._queue.discard(task, reason))

    def _check_trained(self, task: int, trained: int) -> None:
        facts, table = self.registration, self._table
        if facts is None or table is None or not 0 <= task < facts.tasks or not trained:
            return
        records = sum(chunk.records for chunk in table.of_task(task, facts.chunks_per_task))
        if trained > records:
            raise BadRequestToQueue(f"{trained} records trained of task {task}, which has {records}")

    # -- the writer ------------------------------------------------------------------------------------------------

    async def _ask(self, request: Callable[[], R]) -> R:
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
        except StoreLost as error:
            self._lose(error)
        except Exception as error:  # a state that nobody foresaw must not be served
            self._environment.log.error("dispatch_writer_failed", error=repr(error))
            self._lose(StoreLost(f"the queue cannot go on: {error!r}"))

    async def _idle(self) -> None:
        if not self._waiting:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_S):
                    await self._wake.wait()
        self._store.check()

    async def _batch(self) -> None:
        """Answer the waiting requests by one write, and end the leases that are due.

        A report of the batch counts before the deadline of its lease: the master may have been stopped meanwhile.
        """
        queue = self._queue
        queue.now = self._clock()
        answers: list[tuple[asyncio.Future[Any], Any, TrainingError | None]] = []
        while self._waiting and len(answers) < BATCH_REQUESTS and queue.changed < BATCH_ROWS:
            request, answer = self._waiting.popleft()
            try:
                answers.append((answer, request(), None))
            except BadRequestToQueue as error:
                answers.append((answer, None, error))
        queue.expire()
        rows, events = queue.take()
        status = queue.status()
        try:
            if rows:
                await self._store.write(rows)
            self._store.check()
        except BaseException as error:
            lost = error if isinstance(error, StoreLost) else StoreLost(f"the write was cut short: {error!r}")
            _give([(answer, None, StoreLost(str(lost))) for answer, _, _ in answers])
            raise
        self._status = status
        for event in events:
            self._events(event)
        _give(answers)

    def _lose(self, error: StoreLost) -> None:
        if not self._lost.done():
            self._lost.set_result(error)
        waiting, self._waiting = self._waiting, deque()
        _give([(answer, None, StoreLost(str(error))) for _, answer in waiting])
        self._wake.set()


def recovered(
    rules: QueueRules, rows: Mapping[str, bytes], now: float
) -> tuple[TaskQueue, ChunkTable | None, list[FileSummary]]:
    """The queue that a store has, with its chunks. Raises `StateDamaged` or `DatasetDamaged`."""
    queue = TaskQueue(rules, rows, now)
    facts = queue.registration
    if facts is None:
        return queue, None, []
    pieces = [rows.get(_piece(number)) for number in range(facts.pieces)]
    if None in pieces:
        raise StateDamaged("a data set is registered, and its list of chunks is missing")
    table = ChunkTable.decode(b"".join(piece for piece in pieces if piece is not None))
    summary = table.summary()
    if digest_of(summary) != facts.digest or table.tasks(facts.chunks_per_task) != facts.tasks:
        raise StateDamaged("the stored list of chunks is not the registered one")
    return queue, table, summary


def _piece(number: int) -> str:
    return f"chunks/{number:04}"


def _give(answers: Sequence[tuple[asyncio.Future[Any], Any, TrainingError | None]]) -> None:
    for answer, value, error in answers:
        if answer.done():
            continue
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)
