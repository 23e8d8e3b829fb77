"""What repairs a split: a bounded log of the deltas that are in a state, and the copies that lost to a higher term.

Two owners on two sides of a partition both acknowledge, and neither can know. When they meet the higher term stays; the
other keeps its copy as a `SupersededCopy` and offers the deltas of its log, by identity, until the winner has every one
of them (reference/ownership.md section 4). Pure. What happens when comes in as `tick`; `mending` sends the messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from training.encoding.codecs import CodecName
from training.exchange.terms import Term
from training.shards.applied import Applied, DeltaId
from training.shards.state import ShardState

#: (node, incarnation, first step, last step): how losses are reported.
Span = tuple[bytes, int, int, int]


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A delta as it is in a state: `payload` as it came over the wire, `weight` as it was added, `workers` the live
    workers then. `momentum` is False for one that came in by a repair itself."""

    identity: DeltaId
    weight: float
    payload: bytes | bytearray | memoryview
    codec: CodecName
    momentum: bool
    workers: float
    at_s: float


@dataclass(slots=True)
class SupersededCopy:
    """A copy of a shard that lost to a higher term, and the term it had."""

    term: Term
    state: ShardState
    #: Identities of earlier copies that were lost before this one was settled.
    earlier: Applied = field(default_factory=Applied)
    #: How often others were asked for deltas that the own log does not reach.
    sought: int = 0

    @property
    def rank(self) -> tuple[int, Term]:
        """A whole history before one that began anew from a replica, then the later one."""
        return -self.state.era_step, self.term

    def merged_with(self, former: SupersededCopy) -> SupersededCopy:
        """The better of two copies; it remembers the identities of the other, whose deltas are in the log."""
        better, other = (self, former) if self.rank >= former.rank else (former, self)
        better.earlier = other.known()
        return better

    def known(self) -> Applied:
        """Every identity in the copy, visible or held, and in those before it."""
        known = identities_of(self.state)
        known.merge(self.earlier)
        return known


class RepairLog:
    """The deltas of the last `seconds`, at most `limit_bytes` of them, over all shards of one node.

    The clock is the one of `tick`: coarse, and enough to tell how far the log reaches. Entries of a shard in `kept`
    stay whatever their age, for they are being offered; the limit in bytes holds for them too.
    """

    def __init__(self, limit_bytes: int, seconds: float) -> None:
        self.limit_bytes = limit_bytes
        self.seconds = seconds
        self.size_bytes = 0
        self._shards: dict[int, dict[DeltaId, LogEntry]] = {}
        self._order: deque[tuple[int, DeltaId]] = deque()
        self._now_s = 0.0
        self._workers = 1.0
        #: When the youngest entry that had to make room was added; None when none had to.
        self._crowded_out_s: float | None = None

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._shards.values())

    def tick(self, now_s: float, workers: float, kept: Container[int]) -> None:
        """Move the clock, and drop what is too old."""
        self._now_s, self._workers = now_s, workers
        for shard, entries in list(self._shards.items()):
            while shard not in kept and entries:
                oldest = next(iter(entries.values()))
                if now_s - oldest.at_s <= self.seconds:
                    break
                self._drop(shard, oldest)
            if not entries:
                del self._shards[shard]
        while self._order and self._order[0][1] not in self._shards.get(self._order[0][0], {}):
            self._order.popleft()

    def add(
        self,
        shard: int,
        identity: DeltaId,
        weight: float,
        payload: bytes | bytearray | memoryview,
        codec: CodecName,
        *,
        momentum: bool,
        workers: float | None = None,
    ) -> None:
        """Note a delta that has just been added to a state of this node, or (with `workers`) to another's before."""
        if not self.seconds or len(payload) > self.limit_bytes:
            self._crowded_out_s = self._now_s
            return
        entries = self._shards.setdefault(shard, {})
        if identity in entries:
            return
        entries[identity] = LogEntry(identity, weight, payload, codec, momentum, workers or self._workers, self._now_s)
        self._order.append((shard, identity))
        self.size_bytes += len(payload)
        while self.size_bytes > self.limit_bytes:
            oldest_shard, oldest = self._order.popleft()
            entry = self._shards.get(oldest_shard, {}).get(oldest)
            if entry is not None:
                self._drop(oldest_shard, entry)
                self._crowded_out_s = entry.at_s

    def _drop(self, shard: int, entry: LogEntry) -> None:
        del self._shards[shard][entry.identity]
        self.size_bytes -= len(entry.payload)

    def entries(self, shard: int) -> list[LogEntry]:
        """The entries of a shard, oldest first."""
        return list(self._shards.get(shard, {}).values())

    @property
    def reach_s(self) -> float:
        """A split that began this long ago is repaired whole: the time asked for, or less when bytes ran out."""
        if self._crowded_out_s is None:
            return self.seconds
        return max(0.0, min(self.seconds, self._now_s - self._crowded_out_s))


@dataclass(slots=True)
class Difference:
    """What a winner lacks of a remnant: what the log still has, and what it does not reach any more."""

    wanted: list[LogEntry] = field(default_factory=list)
    lost: list[Span] = field(default_factory=list)


def identities_of(state: ShardState) -> Applied:
    """Every identity in a state, visible or held."""
    known = state.applied.copy()
    for held in state.pending.values():
        for item in held:
            known.add(item.identity)
    return known


def compare(remnant: SupersededCopy, winner: Applied, log: Iterable[LogEntry]) -> Difference:
    """Which deltas the winner lacks: those of the log, of whichever copy; and those of the remnant that it has not."""
    winner = winner.copy()
    difference = Difference([entry for entry in log if entry.identity not in winner])
    for entry in difference.wanted:
        winner.add(entry.identity)
    unreached = remnant.known().without(winner)
    difference.lost = [(node, inc, low, high) for node, inc, ranges in unreached.rows() for low, high in ranges]
    return difference
