"""What a node has recorded of one shard: as its owner, its backup, or a former one; and its log of added deltas. Pure.

Two owners on two sides of a partition both acknowledge deltas, and neither can know of the other. When they meet, the
one with the higher term stays the owner. The other keeps its copy as a `SupersededCopy` and offers the deltas of its
log, by identity, until the owner has all of them (`training.exchange.recovery.reconciliation`). Time enters by `tick`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from p2pnode.overlay.peers import Contact
from p2pnode.training.encoding.codecs import Encoded, Vector
from p2pnode.training.encoding.table import CodecName
from p2pnode.training.exchange.ownership_messages import OwnedHistory
from p2pnode.training.exchange.terms import Term, generation_of
from p2pnode.training.shards.applied import Applied, DeltaId
from p2pnode.training.shards.outer_rule import Rule, is_plain
from p2pnode.training.shards.state import ShardState
from p2pnode.training.shards.value_batch import ValueBatch


@dataclass(slots=True)
class Owned:
    """A shard that this node owns. While it is `moving` to its backup, no new delta is added."""

    state: ShardState
    term: Term
    since: float
    backup: Contact | None = None
    learner: Contact | None = None
    moving: bool = False
    #: The highest term number promised to a learner: no two snapshots share one.
    promised: int = 0
    #: The shard came by a hand-over, so that the minimum time as owner (`Rebalancer.tenure_s`) applies. Not
    #: after genesis or a take-over: a young swarm may spread its shards at once.
    by_handover: bool = False
    #: After a take-over: the term of the copy that it began with, and how many deltas that copy had.
    first_copy: tuple[Term, int] | None = None

    @property
    def rank_term(self) -> Term:
        """The term by which the state ranks among copies of the shard.

        Until its first delta, a take-over ranks by the copy it began with. Example: A, a former backup, has a copy of
        term 3. B and C, owner and backup of term 5, are out of reach, and A takes over under term 6. When B is back,
        its copy has deltas that A's lacks: it has to win, as 5 does over 3, and would lose against 6.
        """
        if self.first_copy is not None and self.first_copy[1] == self.state.known_count:
            return self.first_copy[0]
        return self.term

    def rank_as(self, term: Term) -> None:
        """After a take-over: the state ranks by this term until its first delta."""
        self.first_copy = term, self.state.known_count

    # -- targets ------------------------------------------------------------------------------------------------

    @property
    def has_targets(self) -> bool:
        """Whether another node must receive every delta."""
        return self.backup is not None or self.learner is not None

    def targets(self) -> list[Contact]:
        """The nodes that must receive every delta: the backup, and the learner that is to become one."""
        return [contact for contact in (self.backup, self.learner) if contact is not None]

    def target_ids(self) -> tuple[bytes, ...]:
        """The ids of `targets`."""
        return tuple([contact.node_id for contact in self.targets()])

    def remove_learner(self, node_id: bytes) -> None:
        """End the catch-up of a node, if it is the learner; a later attempt begins with a new snapshot."""
        if self.learner is not None and self.learner.node_id == node_id:
            self.learner = None


@dataclass(slots=True)
class BufferedDelta:
    """A delta to be added, possibly before the state that it belongs to has arrived.

    `payload` is the delta as it arrived, in `codec`, which decides the rule it is added by. The repair log keeps it, so
    it must not be written to again.
    """

    identity: DeltaId
    weight: float
    delta: Vector
    payload: Encoded
    codec: CodecName = "float32"
    momentum: bool = True
    #: The delta's length before clipping: the median must follow when all deltas grow.
    norm: float = 0.0
    #: In place of a delta: what came of updates of named values; `payload` is its encoding.
    batch: ValueBatch | None = None

    @property
    def size_bytes(self) -> int:
        """Memory, while it is kept for a state to come."""
        return self.delta.nbytes if self.batch is None else len(self.payload)

    def add_to(self, state: ShardState, rule: Rule, *, synchronous: bool) -> None:
        """Add the delta to a state that lacks it or, under bsp, to its pending deltas."""
        if self.batch is not None:
            state.apply_batch(self.identity, self.batch)
            return
        state.norms.note(*self.identity, self.norm)
        plain = is_plain(self.codec)
        if synchronous:
            state.add_pending(self.identity, self.weight, self.delta, momentum=self.momentum, plain=plain)
        else:
            state.apply(self.identity, self.weight, self.delta, rule, momentum=self.momentum, plain=plain)


@dataclass(slots=True)
class Backed:
    """A shard whose backup this node is, or is to become.

    A learner has no `state` yet, or one with a `promised` term. It becomes the active backup with the owner's first
    forward under that term. Until then it makes no claim and rejects nothing by that term. The owner may not know that
    the state arrived, and may choose another backup. `buffered` keeps the live deltas until then, because a newer
    snapshot would lack them.
    """

    owner: Contact
    term: Term
    state: ShardState | None = None
    promised: Term | None = None
    buffered: list[BufferedDelta] = field(default_factory=list)
    #: The term number promised for the present catch-up: a request without a higher one arrived late.
    attempt: int = 0
    #: The owner has restarted and owns nothing: its backup takes over although the owner answers.
    owner_restarted: bool = False
    #: Of a learner: the first published value of a publication, as it held it when it accepted the catch-up, and its
    #: publication.
    base: tuple[bytes, Vector] | None = None

    @property
    def is_active(self) -> bool:
        """Whether this is the backup, and not a learner."""
        return self.state is not None and self.promised is None

    def activate(self, term: Term) -> None:
        """The owner uses the term promised to this learner: no other snapshot will arrive."""
        self.term, self.promised, self.base = term, None, None
        self.buffered.clear()

    def follow_term(self, term: Term) -> bool:
        """The owner uses this term; True if it makes this learner the backup, or is the backup's new term."""
        if self.promised is not None and term >= self.promised:
            self.activate(term)
            return True
        if self.is_active and term > self.term:
            self.term = term  # the same pair: the owner has raised its term above a fence
            return True
        return False


@dataclass(frozen=True, slots=True)
class StoredState:
    """A state as this node last wrote it. `clean`: no delta was acknowledged after it, for the node left in order."""

    term: Term
    state: ShardState
    clean: bool


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A delta as it was added: `payload` as it arrived, its `weight`, and the number of live `workers` at that time."""

    identity: DeltaId
    weight: float
    payload: bytes | bytearray | memoryview
    codec: CodecName
    workers: float
    at_s: float


class RepairLog:
    """The deltas of the last `seconds`, at most `limit_bytes` of them, over all shards of one node.

    Its clock advances by `tick`: coarse, but enough to know how far back the log reaches. Entries of a shard in `kept`
    stay at any age, for they are being offered; the limit in bytes applies to them too.
    """

    def __init__(self, limit_bytes: int, seconds: float) -> None:
        self.limit_bytes = limit_bytes
        self.seconds = seconds
        self.size_bytes = 0
        #: Of each shard the entries, oldest first; no shard without any.
        self._shards: dict[int, dict[DeltaId, LogEntry]] = {}
        self._now_s = 0.0
        self._workers = 1.0
        #: When the youngest entry that the limit in bytes removed was added; None if there was none.
        self._crowded_out_s: float | None = None

    def __len__(self) -> int:
        return sum(map(len, self._shards.values()))

    def tick(self, now_s: float, workers: float, kept: Container[int]) -> None:
        """Advance the clock, and drop the entries that are too old."""
        self._now_s, self._workers = now_s, workers
        for shard in [shard for shard in self._shards if shard not in kept]:
            entries = self._shards[shard].values()
            for entry in list(takewhile(lambda entry: now_s - entry.at_s > self.seconds, entries)):
                self.forget(shard, entry.identity)

    def add(
        self,
        shard: int,
        identity: DeltaId,
        weight: float,
        payload: bytes | bytearray | memoryview,
        codec: CodecName,
        *,
        workers: float | None = None,
    ) -> None:
        """Log a delta that was just added to a state of this node, or earlier (with `workers`) to that of another."""
        if not self.seconds or len(payload) > self.limit_bytes:
            self._crowded_out_s = self._now_s
            return
        entries = self._shards.setdefault(shard, {})
        if identity in entries:
            return
        entries[identity] = LogEntry(identity, weight, payload, codec, workers or self._workers, self._now_s)
        self.size_bytes += len(payload)
        while self.size_bytes > self.limit_bytes:
            oldest = ((shard, next(iter(entries.values()))) for shard, entries in self._shards.items())
            shard, entry = min(oldest, key=lambda one: one[1].at_s)
            self.forget(shard, entry.identity)
            self._crowded_out_s = entry.at_s

    def forget(self, shard: int, identity: DeltaId) -> None:
        """Drop a delta that is too old, or that no owner will take."""
        entries = self._shards.get(shard, {})
        if (entry := entries.pop(identity, None)) is not None:
            self.size_bytes -= len(entry.payload)
            if not entries:
                del self._shards[shard]

    def entries(self, shard: int) -> list[LogEntry]:
        """The entries of a shard, oldest first."""
        return list(self._shards.get(shard, {}).values())

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


def identities_of(state: ShardState) -> Applied:
    """Every identity in a state, visible or pending."""
    known = state.applied.copy()
    for pending in state.pending.values():
        for item in pending:
            known.add(item.identity)
    return known


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

    def wait_for_another_owner(self, term: Term, now_s: float) -> None:
        """The owner under this term cannot tell which of the copy's deltas it has."""
        if self.unclear_at is None:
            self.unclear_since_s = now_s
        self.unclear_at = term

    def takes_back(self, history: OwnedHistory) -> bool:
        """Whether the shard goes on from this copy, and the owner offers what it has beside: it is unknown which deltas
        the replica had from which the owner began."""
        # Promise 6 (docs/faults.md): of two states from before a restart the higher one counts.
        is_of_before = self.is_stored or generation_of(history.term) > generation_of(self.term)
        if is_of_before and self.state.known_count <= history.known_count:
            return False
        # Promise 5: the side with the whole history goes on.
        # A term with the same number is the other side's: its state cannot descend from this copy.
        if history.era_step <= self.state.era_step or self.term.number < history.era_term.number:
            return False
        # A new era that started from a state on disk has its identities, and may have all of this copy's.
        return bool(self.known().without(history.known_deltas()).rows())

    def is_unclear_to(self, history: OwnedHistory) -> bool:
        """Whether the owner cannot tell which deltas of this copy it has: none is added to it then."""
        return bool(history.unlisted) if self.is_stored else history.era_step > self.state.era_step


class Difference(NamedTuple):
    """What an owner lacks: deltas of the log, and identities that no entry of the log can bring."""

    wanted: list[LogEntry]
    lost: Applied


def compare(copy: SupersededCopy, winner: Applied, log: Iterable[LogEntry]) -> Difference:
    """What the winner lacks of a superseded copy, and of the log, of whatever copy. It takes no delta that it may have
    forgotten, and forgets none that a log should still reach: such an entry is lost."""
    lacking = [entry for entry in log if entry.identity not in winner]
    forgotten = [entry.identity for entry in lacking if winner.may_have_forgotten(entry.identity)]
    wanted = [entry for entry in lacking if not winner.may_have_forgotten(entry.identity)]
    known = winner.copy()
    for entry in wanted:
        known.add(entry.identity)
    lost = copy.known().without(known)
    for identity in forgotten:
        lost.add(identity)
    return Difference(wanted, lost)
