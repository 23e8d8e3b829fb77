"""What a master and a worker know of the records, for `/status`. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from p2pnode.training.dispatch.answers import QueueStatus
from p2pnode.training.dispatch.messages import QueueCounts


@dataclass(frozen=True, slots=True)
class MasterFacts:
    """`queue` is None while this node does not serve; `reason` says why, or what failed last."""

    store: str
    serves_since: float | None
    epoch: int
    queue: QueueStatus | None
    discarded: int
    reason: str


class Trouble(NamedTuple):
    """The master has not answered since `since` (monotonic seconds), and why."""

    since: float
    reason: str


@dataclass(frozen=True, slots=True)
class RecordsFacts:
    """`counts`: the queue as the master last told of it. `refused`: why this node gets no tasks, and what to do."""

    counts: QueueCounts | None
    master: bytes | None
    trouble: Trouble | None
    refused: tuple[str, str] | None
    held: int
    trained: int
    finished: int
    superseded: int
    ended: bool
