"""A bounded log of added deltas, from which the two sides of a network split are reconciled. Pure.

Two owners on two sides of a partition both acknowledge deltas, and neither can know of the other. When they meet, the
one with the higher term stays the owner. The other keeps its copy as a `SupersededCopy` and offers the deltas of its
log, by identity, until the owner has all of them (docs/protocol.md). Time enters by `tick`; the messages are sent by
`training.exchange.recovery.reconciliation`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from training.encoding.codecs import CodecName
from training.exchange.terms import Term
from training.shards.applied import Applied, DeltaId
from training.shards.state import ShardState

#: (node, incarnation, first step, last step): the form in which losses are reported.
Span = tuple[bytes, int, int, int]


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A delta as it was added: `payload` as it arrived, its `weight`, and the number of live `workers` at that time.

    `momentum` is False for a delta that a repair added.
    """

    identity: DeltaId
    weight: float
    payload: bytes | bytearray | memoryview
    codec: CodecName
    momentum: bool
    workers: float
    at_s: float


@dataclass(slots=True)
class SupersededCopy:
    """A copy of a shard that lost to a higher term, and its own term."""

    term: Term
    state: ShardState
    #: Identities of earlier superseded copies that were not settled before this one.
    earlier: Applied = field(default_factory=Applied)
    #: How often other nodes were asked for deltas that the own log does not reach.
    sought: int = 0
    #: Read from disk, by a node that came after the others had gone on.
    is_stored: bool = False
    #: The term of an owner that began a new era from a replica: which of these deltas that one has is unknown. The copy
    #: only waits, as long as a log reaches, for an owner that can tell.
    unclear_at: Term | None = None
    unclear_since_s: float = 0.0
    #: Deltas of it that were reported as lost.
    reported: int = 0

    @property
    def rank(self) -> tuple[int, Term]:
        """A copy with the whole history ranks above one of a new era, then the higher term counts."""
        return -self.state.era_step, self.term

    @property
    def is_usable(self) -> bool:
        """Whether a node may continue from it."""
        return self.unclear_at is None

    def wait_for_another_owner(self, term: Term, now_s: float) -> None:
        """The owner under this term cannot tell which of the copy's deltas it has."""
        if self.unclear_at is None:
            self.unclear_since_s = now_s
        self.unclear_at = term

    def merged_with(self, former: SupersededCopy) -> SupersededCopy:
        """The better of two copies; it remembers the identities of the other, whose deltas are in the log."""
        better, other = (self, former) if self.rank >= former.rank else (former, self)
        better.earlier = other.known()
        better.unclear_at, better.reported = None, former.reported
        return better

    def known(self) -> Applied:
        """Every identity in the copy, visible or pending, and in the earlier ones."""
        known = identities_of(self.state)
        known.merge(self.earlier)
        return known


def to_mend(superseded: Mapping[int, SupersededCopy]) -> list[int]:
    """The shards whose superseded copies are not settled."""
    return [shard for shard, copy in superseded.items() if copy.unclear_at is None]


class RepairLog:
    """The deltas of the last `seconds`, at most `limit_bytes` of them, over all shards of one node.

    Its clock advances by `tick`: coarse, but enough to know how far back the log reaches. Entries of a shard in `kept`
    stay at any age, for they are being offered; the limit in bytes applies to them too.
    """

    def __init__(self, limit_bytes: int, seconds: float) -> None:
        self.limit_bytes = limit_bytes
        self.seconds = seconds
        self.size_bytes = 0
        self._shards: dict[int, dict[DeltaId, LogEntry]] = {}
        self._order: deque[tuple[int, DeltaId]] = deque()
        self._now_s = 0.0
        self._workers = 1.0
        #: When the youngest entry that the limit in bytes removed was added; None if there was none.
        self._crowded_out_s: float | None = None

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._shards.values())

    def tick(self, now_s: float, workers: float, kept: Container[int]) -> None:
        """Advance the clock, and drop the entries that are too old."""
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
        """Log a delta that was just added to a state of this node, or earlier (with `workers`) to that of another."""
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

    def forget(self, shard: int, identity: DeltaId) -> None:
        """Drop a delta that no owner will take."""
        entry = self._shards.get(shard, {}).get(identity)
        if entry is not None:
            self._drop(shard, entry)

    def _drop(self, shard: int, entry: LogEntry) -> None:
        del self._shards[shard][entry.identity]
        self.size_bytes -= len(entry.payload)

    def entries(self, shard: int) -> list[LogEntry]:
        """The entries of a shard, oldest first."""
        return list(self._shards.get(shard, {}).values())

    def find(self, shard: int, identity: DeltaId) -> LogEntry | None:
        """One delta of a shard, if the log has it."""
        return self._shards.get(shard, {}).get(identity)

    @staticmethod
    def those_of(entries: list[LogEntry], rows: list[tuple[bytes, int, list[tuple[int, int]]]]) -> list[LogEntry]:
        """The entries whose identities are in these rows, which are another node's: those of others are passed over."""
        starts = dict.fromkeys(entry.identity[:2] for entry in entries)
        wanted = Applied.of_rows([row for row in rows if row[:2] in starts])
        return [entry for entry in entries if entry.identity in wanted]

    @property
    def reach_s(self) -> float:
        """A split that began this long ago is repaired completely: `seconds`, or less if the limit removed entries."""
        if self._crowded_out_s is None:
            return self.seconds
        return max(0.0, min(self.seconds, self._now_s - self._crowded_out_s))


@dataclass(slots=True)
class Difference:
    """What an owner lacks of a superseded copy: deltas that are in the log, and those that are not any more."""

    wanted: list[LogEntry] = field(default_factory=list)
    lost: list[Span] = field(default_factory=list)


def identities_of(state: ShardState) -> Applied:
    """Every identity in a state, visible or pending."""
    known = state.applied.copy()
    for pending in state.pending.values():
        for item in pending:
            known.add(item.identity)
    return known


def spans(lost: Applied) -> list[Span]:
    """The form in which losses are reported."""
    return [(node, incarnation, low, high) for node, incarnation, ranges in lost.rows() for low, high in ranges]


def only_here(copy: SupersededCopy, theirs: Applied, log: Iterable[LogEntry] = ()) -> Applied:
    """The deltas of a superseded copy that its owner lacks. So do those of the `log` that the owner may have forgotten:
    it will not take them, and forgets nothing that a log should still reach."""
    missing = copy.known().without(theirs)
    for entry in log:
        if theirs.may_have_forgotten(entry.identity):
            missing.add(entry.identity)
    return missing


def compare(lost_copy: SupersededCopy, winner: Applied, log: Iterable[LogEntry]) -> Difference:
    """The deltas that the winner lacks: those in the log, of any copy, and those of `lost_copy` that the log lacks. It
    takes none that it may have forgotten."""
    winner = winner.copy()
    lacks = [entry for entry in log if entry.identity not in winner and not winner.may_have_forgotten(entry.identity)]
    difference = Difference(lacks)
    for entry in difference.wanted:
        winner.add(entry.identity)
    difference.lost = spans(lost_copy.known().without(winner))
    return difference
