"""The master: serves one queue of tasks to the nodes of a run, while its store is this node's.

It opens the store, which with etcd means to wait for the lock, publishes its record (`training.dispatch.client`) and
answers requests until the store is lost; then it answers nothing and tries to open it again. The overlay tells it which
workers died, and their leases are given back at once. All decisions are the queue's (`training.dispatch.queue`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import msgspec

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.ids import short
from p2pnode.overlay.peers import Contact, PeerChange
from p2pnode.overlay.transport import Buffer, RequestRejected, Response, gathered, in_parts
from p2pnode.training.dispatch.answers import (
    Answer,
    BadRequestToQueue,
    DatasetRegistered,
    End,
    Handout,
    LeaseEnded,
    PassEnded,
    QueueEvent,
    QueueRules,
    QueueStatus,
    Registration,
    ReportAnswer,
    TaskDiscarded,
)
from p2pnode.training.dispatch.chunks import BadDataset, ChunkTable, DatasetDamaged, DatasetDiffers
from p2pnode.training.dispatch.client import PUBLISH_S, MasterDirectory
from p2pnode.training.dispatch.messages import (
    DISPATCH,
    MAX_MESSAGE_BYTES,
    MAX_TEXT,
    DatasetTold,
    DispatchAnswer,
    DispatchRequest,
    EndTask,
    GetTask,
    MasterRecord,
    QueueCounts,
    RegisterDataset,
    RenewTasks,
    ReportDataset,
    ReportsTold,
    TaskTold,
    TryAgain,
    decode_request,
    encode,
)
from p2pnode.training.dispatch.store import Store, StoreHeld, StoreLost, StoreRefused
from p2pnode.training.dispatch.stored_queue import StoredQueue
from p2pnode.training.errors import TrainingError
from p2pnode.training.settings import DispatchSettings
from p2pnode.training.swarm import Swarm
from p2pnode.training.trainer_link.record_messages import RecordTask

#: A store that could not be opened is tried again so often.
REOPEN_S = 2.0
#: A new master gives back the leases of nodes that are not alive and that it has not heard of for so long. Workers
#: renew more often.
GRACE_S = 20.0
#: A task that no living worker can read is discarded after so long.
UNREADABLE_S = 30.0
#: A worker counts as one that could read a task if it has asked within this time.
ACTIVE_S = 60.0


@dataclass(frozen=True, slots=True)
class MasterFacts:
    """What a master shows of itself. `queue` is None while this node does not serve; `reason` says why, or what failed
    last."""

    store: str
    serves_since: float | None
    epoch: int
    queue: QueueStatus | None
    discarded: int
    reason: str


class MasterService:
    """One node's service as master. `make_store` makes the store that the settings name, not opened yet."""

    #: The lease of a task follows from how long tasks take. Nodes that read and train over slow lines report less often
    #: than the workers of a parameter server, whose leases may be shorter.
    rules = QueueRules(lease_floor_s=30.0)
    #: None: as many as the data set asks for. Tests set another number.
    chunks_per_task: int | None = None

    def __init__(
        self,
        swarm: Swarm,
        directory: MasterDirectory,
        settings: DispatchSettings,
        seed: int,
        make_store: Callable[[], Store],
        environment: Environment,
    ) -> None:
        self._swarm = swarm
        self._directory = directory
        self._settings = settings
        self._seed = seed
        self._make_store = make_store
        self._environment = environment
        self._clock = environment.clock
        self._log = environment.log
        self._genesis = b""
        self._queue: StoredQueue | None = None
        self._serves_since: float | None = None
        self._record: MasterRecord | None = None
        self._reason = "the store is not open yet"
        self._discarded = 0
        #: Workers → when they last asked.
        self._heard: dict[bytes, float] = {}
        #: Nodes whose leases are to be given back.
        self._gone: dict[bytes, None] = {}
        #: Tasks that some workers cannot read → those workers, and since when.
        self._unreadable: dict[int, tuple[dict[bytes, None], float]] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        swarm.register(DISPATCH, self._on_request)
        swarm.on_change(self._on_change)
        directory.on_record(lambda _: self._wake.set())

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self, genesis: bytes) -> None:
        """The node has entered the swarm with this genesis."""
        self._genesis = genesis
        self._task = asyncio.create_task(self._run(), name="dispatch-master")

    async def stop(self) -> None:
        """Stop serving and give the store up; idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def store(self) -> str:
        """The kind of the store, without its address."""
        return self._settings.store.partition(":")[0]

    @property
    def is_done(self) -> bool:
        """Whether this node serves, and the job has ended."""
        return self._queue is not None and self._queue.status().end != End.NO

    def facts(self) -> MasterFacts:
        queue = self._queue
        registered = queue is not None and queue.registration is not None
        return MasterFacts(
            store=self.store,
            serves_since=self._serves_since,
            epoch=0 if queue is None else queue.epoch,
            queue=queue.status() if queue is not None and registered else None,
            discarded=self._discarded,
            reason=self._reason,
        )

    async def _run(self) -> None:
        while True:
            try:
                await self._open_and_serve()
            except TrainingError as error:  # of the store, of what it has, or of the setting that names it
                self._note_fault(str(error))
            except Exception as error:  # of this master: another store, or the same once more, may be served still
                self._note_fault(f"the master had a fault: {error!r}")
            await asyncio.sleep(REOPEN_S)

    async def _open_and_serve(self) -> None:
        queue = StoredQueue(self._make_store(), self._rules(), self._environment, self._on_event)
        try:
            await queue.open()
            await self._serve(queue)
        finally:
            self._queue, self._serves_since = None, None
            if self._record is not None:
                self._directory.forget(self._record)
            await queue.close()

    def _rules(self) -> QueueRules:
        return msgspec.structs.replace(self.rules, passes=self._settings.passes)

    def _note_fault(self, reason: str) -> None:
        if reason != self._reason:
            self._reason = reason
            self._log.error("dispatch_store_failed", store=self.store, reason=reason)

    async def _serve(self, queue: StoredQueue) -> None:
        """Serve until the store is lost."""
        if self.store != "etcd" and (rival := await self._directory.confirmed(self._genesis)) is not None:
            raise StoreHeld(_two_masters(rival.node_id))
        self._queue, self._serves_since, self._reason = queue, self._clock.monotonic(), ""
        self._heard.clear()
        self._unreadable.clear()
        self._gone = {node: None for node in queue.holders() if self._swarm.is_gone(node)}
        self._log.info("dispatch_serves", store=self.store, epoch=queue.epoch)
        lost = asyncio.create_task(queue.lost(), name="dispatch-lost")
        try:
            while not lost.done():
                await self._publish(queue)
                await self._give_back(queue)
                waking = asyncio.create_task(self._wake.wait())
                await asyncio.wait((lost, waking), timeout=PUBLISH_S, return_when=asyncio.FIRST_COMPLETED)
                waking.cancel()
                self._wake.clear()
                self._give_way()
            raise lost.result()
        finally:
            lost.cancel()

    async def _publish(self, queue: StoredQueue) -> None:
        identity = b"" if queue.registration is None else queue.registration.identity
        self._record = self._directory.own_record(queue.epoch, identity)
        await self._directory.publish(self._genesis, self._record)

    def _give_way(self) -> None:
        """Two masters that began at the same time, each with a store of its own, must agree on one of them. Raises
        `StoreHeld`."""
        own, other = self._record, self._other_record()
        if self.store != "etcd" and own is not None and other is not None and _rank_of(other) > _rank_of(own):
            raise StoreHeld(_two_masters(other.node_id))

    # -- workers that are gone -----------------------------------------------------------------------------------

    def _on_change(self, change: PeerChange) -> None:
        if change.kind in ("dead", "left"):
            self._gone[change.node_id] = None
            self._heard.pop(change.node_id, None)
            self._wake.set()
        elif change.kind in ("up", "returned"):
            self._wake.set()  # it may be a node that should keep the record

    async def _give_back(self, queue: StoredQueue) -> None:
        """Give back the leases of nodes that are gone, and of those that a former master may have missed."""
        assert self._serves_since is not None
        if self._clock.monotonic() - self._serves_since > GRACE_S:
            for node in queue.holders():
                if node not in self._heard and node != self._swarm.node_id and not self._swarm.is_alive(node):
                    self._gone[node] = None
        for node in list(self._gone):
            try:
                leases = await queue.worker_gone(node)
            except StoreRefused as error:
                self._note_fault(str(error))
                return
            self._gone.pop(node, None)
            if leases:
                self._log.warning("dispatch_worker_gone", node=short(node), leases=leases)

    # -- requests ------------------------------------------------------------------------------------------------

    async def _on_request(self, sender: Contact, _: bytes, body: AsyncIterator[Buffer]) -> Response:
        try:
            request = decode_request(await gathered(body, MAX_MESSAGE_BYTES))
        except (ValueError, RecursionError) as error:
            raise RequestRejected(f"malformed request to the master: {error}") from error
        return Response(b"", in_parts(encode(await self.answer(sender.node_id, request))))

    async def answer_own(self, request: DispatchRequest) -> DispatchAnswer:
        """Answer the worker of this node."""
        try:
            return await self.answer(self._swarm.node_id, request)
        except RequestRejected as error:
            return TryAgain(str(error))

    async def answer(self, worker: bytes, request: DispatchRequest) -> DispatchAnswer:
        """Answer one request of a node. Raises `RequestRejected` for one that no worker makes."""
        queue = self._queue
        if queue is None:
            return TryAgain(f"this node does not serve now: {self._reason}"[:MAX_TEXT], self._other_record())
        self._heard[worker] = self._clock.monotonic()
        try:
            return await self._answer(queue, worker, request)
        except StoreRefused as error:
            return TryAgain(str(error)[:MAX_TEXT])
        except StoreLost as error:
            return TryAgain(str(error)[:MAX_TEXT], self._other_record())
        except (DatasetDiffers, BadDataset) as error:
            return DatasetTold(is_wanted=False, refused=str(error)[:MAX_TEXT], identity=b"")
        except (BadRequestToQueue, DatasetDamaged) as error:
            raise RequestRejected(str(error)) from error

    def _other_record(self) -> MasterRecord | None:
        record = self._directory.record
        return None if record is None or record.node_id == self._swarm.node_id else record

    async def _answer(self, queue: StoredQueue, worker: bytes, request: DispatchRequest) -> DispatchAnswer:
        match request:
            case ReportDataset(files):
                if queue.registration is None:
                    return DatasetTold(is_wanted=True, refused="", identity=b"")
                return DatasetTold(is_wanted=False, refused="", identity=queue.agree(files).identity)
            case RegisterDataset(table):
                return await self._register(queue, table)
            case GetTask(identity, held, avoid):
                if not _is_of(queue.registration, identity):
                    return TaskTold(Answer.NO_DATASET, None, 0.0, 0.0, None)
                handout = await queue.get(worker, held, avoid)
                if avoid:
                    await self._discard_unreadable(queue, worker, avoid)
                return self._told(queue, handout)
            case EndTask() if not _is_of(queue.registration, request.identity):
                return ReportsTold([ReportAnswer.UNKNOWN], self.counts())
            case EndTask(_, task, attempt, cause, trained):
                if cause is None:
                    self._unreadable.pop(task, None)
                    return ReportsTold([await queue.finish(worker, task, attempt)], self.counts())
                return ReportsTold([await queue.fail(worker, task, attempt, cause, trained)], self.counts())
            case RenewTasks(identity, held):
                if not _is_of(queue.registration, identity):
                    return ReportsTold([ReportAnswer.UNKNOWN for _ in held], self.counts())
                return ReportsTold(await queue.renew(worker, held), self.counts())

    async def _register(self, queue: StoredQueue, encoded: bytes) -> DatasetTold:
        table = await self._environment.executor.run(ChunkTable.decode, encoded)
        wanted = Registration(
            identity=self._environment.entropy.token(16),
            digest=b"",
            tasks=0,
            chunks_per_task=self.chunks_per_task or table.chunks_per_task,
            shuffle=self._settings.shuffle,
            seed=self._seed,
        )
        registered = await queue.register(table, wanted)
        self._wake.set()  # the record has an identity now
        return DatasetTold(is_wanted=False, refused="", identity=registered.identity)

    def _told(self, queue: StoredQueue, handout: Handout) -> TaskTold:
        lease, facts, table = handout.lease, queue.registration, queue.table
        if lease is None or facts is None or table is None:
            return TaskTold(handout.answer, None, 0.0, handout.retry_after_s, self.counts())
        chunks = table.of_task(lease.task, facts.chunks_per_task)
        order = _order_of(facts.seed, lease.pass_number, lease.task) if facts.shuffle else 0
        task = RecordTask(lease.task, lease.attempt, lease.pass_number, order, lease.trained, chunks)
        return TaskTold(Answer.TASK, task, lease.duration_s, 0.0, self.counts())

    async def _discard_unreadable(self, queue: StoredQueue, worker: bytes, avoid: list[int]) -> None:
        """Give up the tasks that no worker that lives can read, after they have waited for one that can."""
        now = self._clock.monotonic()
        active = {node for node, heard in self._heard.items() if now - heard < ACTIVE_S}
        for task in avoid:
            workers, since = self._unreadable.setdefault(task, ({}, now))
            workers[worker] = None
            if now - since >= UNREADABLE_S and active <= workers.keys():
                await queue.discard(
                    task, f"none of {len(active)} nodes can read it: see dispatch_task_failed in their logs"
                )
                self._unreadable.pop(task, None)

    def counts(self) -> QueueCounts | None:
        """The queue, for workers; None before a data set is registered."""
        queue = self._queue
        if queue is None or queue.registration is None:
            return None
        return QueueCounts(queue.status(), self._discarded, self.store)

    # -- events --------------------------------------------------------------------------------------------------

    def _on_event(self, event: QueueEvent) -> None:
        match event:
            case TaskDiscarded(task, attempt, reason):
                self._discarded += 1
                self._log.error(
                    "dispatch_task_discarded",
                    task=task,
                    attempt=attempt,
                    reason=reason,
                    errors=event.errors,
                    timeouts=event.timeouts,
                    deaths=event.deaths,
                )
            case LeaseEnded(task, attempt, worker, cause):
                self._log.info("dispatch_lease_ended", task=task, attempt=attempt, node=short(worker), cause=str(cause))
            case PassEnded(number, done, failed, end):
                self._unreadable.clear()
                self._log.info(
                    "dispatch_pass_ended", number=number, done=done, failed=failed, end=str(end) or "next pass"
                )
            case DatasetRegistered(tasks, chunks_per_task):
                self._log.info("dispatch_dataset_registered", tasks=tasks, chunks_per_task=chunks_per_task)


def _rank_of(record: MasterRecord) -> tuple[int, bool, bytes]:
    """Of two masters with stores of their own the higher one goes on: the later epoch, the one with a data set."""
    return record.epoch, bool(record.identity), record.contact


def _two_masters(other: bytes) -> str:
    """Why this node does not serve."""
    return (
        f"the node {short(other)} is the master of this run, with a store of its own: one master at a time can keep "
        'its queue in SQLite; use dispatch.store = "etcd://…" for more than one'
    )


def _is_of(registration: Registration | None, identity: bytes) -> bool:
    """Whether a request is about the tasks of this queue."""
    return registration is not None and registration.identity == identity


def _order_of(seed: int, pass_number: int, task: int) -> int:
    """The seed of the order of a task's records in one pass; never 0."""
    digest = hashlib.blake2b(f"{seed}/{pass_number}/{task}/records".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 2) | 1
