"""What the queue answers and reports: leases, answers to a worker, events for people, and its rules. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from p2pnode.overlay.peers import Counter
from p2pnode.training.errors import TrainingError

#: Tasks that a worker may name as unreadable for itself, and leases that it may hold.
MAX_AVOIDED = 64
MAX_HELD = 64


class BadRequestToQueue(TrainingError):
    """A request that no worker of this program makes. What cannot be a request is refused where it is decoded."""


class Answer(StrEnum):
    """Answers to a worker that asks for a task. None of them means to wait for ever.

    `NO_TASK_NOW`: every open task is leased; ask again after `retry_after_s`. `JOB_DONE`: all passes are over.
    `ALL_FAILED`: the last pass ended without one finished task, so the job ended. `NO_DATASET`: nothing is registered
    yet.
    """

    TASK = "task"
    NO_TASK_NOW = "no_task_now"
    JOB_DONE = "job_done"
    ALL_FAILED = "all_failed"
    NO_DATASET = "no_dataset"


class ReportAnswer(StrEnum):
    """Answers to a report about an attempt; a repeated report gets the same one.

    `ACCEPTED`: this attempt finished the task. `RETURNED`: the failed attempt is over, whoever ended it. `RENEWED`: the
    lease stands. `SUPERSEDED`: the attempt does not count (any more), and the report had no effect. `NOT_HOLDER`:
    another worker has this attempt. `UNKNOWN`: no such attempt was handed out.
    """

    ACCEPTED = "accepted"
    RETURNED = "returned"
    RENEWED = "renewed"
    SUPERSEDED = "superseded"
    NOT_HOLDER = "not_holder"
    UNKNOWN = "unknown"


class Cause(StrEnum):
    """Why a lease ended without a finished task. Workers report the first three, the queue finds the others itself.

    `ERROR` counts towards `max_failures`. `TIMEOUT` and `DEATH` count towards `max_losses` together. `RELEASE` (the
    worker leaves, or what it trained was dropped) and `MISSING` (it cannot read the file) count nothing.
    """

    ERROR = "error"
    RELEASE = "release"
    MISSING = "missing"
    TIMEOUT = "timeout"
    DEATH = "death"


REPORTED_CAUSES = frozenset({Cause.ERROR, Cause.RELEASE, Cause.MISSING})


class End(StrEnum):
    """How the job ended; `NO` while it runs."""

    NO = ""
    DONE = "done"
    ALL_FAILED = "all_failed"


class QueueRules(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the queue; they may change at a restart of the master, unlike what `Registration` has.

    A task is discarded after more than `max_failures` task errors, or after more than `max_losses` timeouts and deaths
    of workers: those are mostly no fault of the task, but one that kills every worker must not circulate for ever. A
    lease takes `clamp(lease_factor × mean task time, lease_floor_s, lease_ceiling_s)`, the ceiling while no task time
    is known. Renewals keep a lease for at most `holds` ceilings. `passes` 0: without end.
    """

    passes: int = 1
    max_failures: int = 3
    max_losses: int = 16
    lease_factor: float = 3.0
    lease_floor_s: float = 10.0
    lease_ceiling_s: float = 1200.0
    holds: float = 10.0
    leases_per_worker: int = 16

    def __post_init__(self) -> None:
        if self.max_failures < 0:
            raise ValueError("max_failures must be ≥ 0")
        if not 0 < self.lease_floor_s <= self.lease_ceiling_s < float("inf"):
            raise ValueError("the lease must have 0 < lease_floor_s ≤ lease_ceiling_s")

    def renewed(self, leased_at: float, deadline: float, wanted: float) -> float:
        """The deadline of a lease that is renewed to last until `wanted`."""
        return max(deadline, min(wanted, leased_at + self.holds * self.lease_ceiling_s))


class Registration(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What the first registration of a data set settles for good.

    `digest` is that of the chunks (`chunks.digest_of`), `identity` a random name of this queue. Both are shown to
    others, so that two masters with different queues notice each other.
    """

    identity: bytes
    digest: bytes
    tasks: int
    chunks_per_task: int
    shuffle: bool
    seed: int
    #: Rows of the store that have the list of chunks.
    pieces: int = 0

    def order(self, pass_number: int) -> list[int]:
        """All tasks in the order of a pass."""
        order = list(range(self.tasks))
        if self.shuffle:
            random.Random(f"{self.seed}/{pass_number}").shuffle(order)
        return order


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A lease as its worker knows it; `trained` counts the records of the task that it has trained, from the first."""

    task: Counter
    attempt: Counter
    trained: Counter = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """A task that a worker has.

    `attempt` is a fencing token: it rises with every hand-out of the task, over passes and restarts too. `deadline` is
    on the master's monotonic clock. The first `trained` records of the task are trained.
    """

    task: int
    attempt: int
    worker: bytes
    pass_number: int
    duration_s: float
    deadline: float
    trained: int


@dataclass(frozen=True, slots=True)
class Handout:
    """The answer to a worker that asks for a task; `lease` is None unless `answer` is `TASK`."""

    answer: Answer
    lease: Lease | None = None
    retry_after_s: float = 0.0


class QueueStatus(msgspec.Struct, frozen=True, array_like=True):
    """The queue as stored, for people. `todo + leased + done + failed == tasks` at every instant."""

    pass_number: Counter
    passes: Counter
    tasks: Counter
    todo: Counter
    leased: Counter
    done: Counter
    failed: Counter
    end: End


@dataclass(frozen=True, slots=True)
class TaskDiscarded:
    """A task is given up until the next pass. `reason` is the cause, or the text of an explicit discard."""

    task: int
    attempt: int
    reason: str
    errors: int
    timeouts: int
    deaths: int


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """A lease ended without a finished task, which is open again."""

    task: int
    attempt: int
    worker: bytes
    cause: Cause


@dataclass(frozen=True, slots=True)
class PassEnded:
    """All tasks of a pass are finished or discarded; `end` says whether the job ended with it."""

    pass_number: int
    done: int
    failed: int
    end: End


@dataclass(frozen=True, slots=True)
class DatasetRegistered:
    """The first registration of a data set was stored."""

    tasks: int
    chunks_per_task: int


QueueEvent = TaskDiscarded | LeaseEnded | PassEnded | DatasetRegistered
