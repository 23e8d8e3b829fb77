"""What a node knows of one shard: as its owner, as its backup, or by hearsay. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from overlay.peers import Contact
from training.encoding.codecs import CodecName, Vector
from training.exchange.messages import Window
from training.exchange.terms import Term
from training.shards.applied import DeltaId
from training.shards.outer_rule import Rule
from training.shards.robust import is_complete
from training.shards.state import ShardState


@dataclass(slots=True)
class Owned:
    """A shard whose owner this node is. `moving` while it is being handed over: no new delta is begun."""

    state: ShardState
    term: Term
    since: float
    backup: Contact | None = None
    learner: Contact | None = None
    moving: bool = False
    #: The highest number promised to a learner for the day it becomes backup: no two snapshots share one.
    promised: int = 0
    #: Genesis and take-over owe nobody a tenure: a young swarm may spread its shards at once.
    has_tenure: bool = False
    #: Of a take-over: the term of the copy it began with, and how many deltas that copy had.
    first_copy: tuple[Term, int] | None = None
    #: Windows of the trimmed mean made visible here that a backup or learner may not have heard of, oldest first; how
    #: many there were before those; and how many each of them has.
    closed_windows: list[Window] = field(default_factory=list)
    dropped_windows: int = 0
    acked_windows: dict[bytes, int] = field(default_factory=dict)

    @property
    def rank_term(self) -> Term:
        """The term by which the state ranks among copies of the shard. A take-over adds nothing to the copy it began
        with until the first delta: another's copy of a later pair is worth more, under however low a term."""
        if self.first_copy is not None and self.first_copy[1] == self.state.known_count:
            return self.first_copy[0]
        return self.term

    @property
    def has_targets(self) -> bool:
        """Whether anybody else must be sent every delta."""
        return self.backup is not None or self.learner is not None

    def targets(self) -> list[Contact]:
        """Who must be sent every delta: the backup, and the learner that is to become one."""
        return [contact for contact in (self.backup, self.learner) if contact is not None]

    @property
    def closed_count(self) -> int:
        """How many windows were made visible under this ownership."""
        return self.dropped_windows + len(self.closed_windows)

    def unsent_windows(self, node_id: bytes) -> list[Window]:
        """The windows that a node may not have heard of."""
        return self.closed_windows[max(0, self.acked_windows.get(node_id, 0) - self.dropped_windows) :]

    def ack_windows(self, node_id: bytes, count: int) -> None:
        """It knows the first `count` windows; what all know is forgotten."""
        self.acked_windows[node_id] = max(count, self.acked_windows.get(node_id, 0))
        known = min((self.acked_windows.get(to.node_id, 0) for to in self.targets()), default=self.closed_count)
        if known > self.dropped_windows:
            del self.closed_windows[: known - self.dropped_windows]
            self.dropped_windows = known

    def fold(self, step: int, rule: Rule) -> None:
        """The barrier of a step has passed: make its deltas visible."""
        if rule.robust != "trimmed-mean":
            self.state.fold(step, rule)
            return
        self.state.folded_step = max(self.state.folded_step, step)
        for ready in sorted(number for number in self.state.pending if number <= step):
            self.close(sorted(pending.identity for pending in self.state.pending[ready]), rule)

    def close(self, window: list[DeltaId], rule: Rule) -> None:
        """Make a window visible; backup and learner are told with the next delta."""
        self.state.close(window, rule)
        self.closed_windows.append(window)
        if not self.has_targets:
            self.dropped_windows += len(self.closed_windows)
            self.closed_windows.clear()

    def close_complete(self, workers: float, rule: Rule) -> bool:
        """Close the present window if it is complete; True if it was."""
        if not self.state.pending or self.moving:
            return False
        window = [pending.identity for pending in self.state.pending_deltas()]
        members = len({identity.node: None for identity in window})
        if not is_complete(members, len(window), workers):
            return False
        self.close(window, rule)
        return True


@dataclass(slots=True)
class BufferedDelta:
    """A delta to be added, perhaps before the state it belongs to has come.

    `payload` is the delta as it came, in `codec`: the repair log keeps it, so nobody may write into it again. Without
    one the log encodes the delta itself, in `codec`.
    """

    identity: DeltaId
    weight: float
    delta: Vector
    synchronous: bool
    payload: bytes | bytearray | memoryview | None = None
    codec: CodecName = "float32"
    momentum: bool = True
    #: The delta's length, before clipping: if all deltas grow the median has to follow.
    norm: float = 0.0
    #: Whether a split may have another side that lacks it: not while there was never anybody else.
    is_logged: bool = True


@dataclass(slots=True)
class Backed:
    """A shard whose backup this node is, or is to become.

    A learner has no `state` yet, or has one with a `promised` term: it becomes the backup in office when the owner
    first speaks under that term. Until then it neither claims nor fences anything by it, because the owner may never
    have heard that the state arrived, and may go on with another backup. `buffered` keeps the live deltas until then:
    should a newer snapshot replace this one, they have to be added to that one as well.
    """

    owner: Contact
    term: Term
    state: ShardState | None = None
    promised: Term | None = None
    buffered: list[BufferedDelta] = field(default_factory=list)
    #: Windows closed meanwhile, to be closed in that state too.
    closed_windows: list[Window] = field(default_factory=list)
    #: The number promised for the present lesson: a call to learn that is not above it came late.
    attempt: int = 0
    #: The owner was started anew since, and owns nothing: whoever backs it takes over, although it answers.
    owner_restarted: bool = False

    @property
    def is_active(self) -> bool:
        return self.state is not None and self.promised is None

    def activate(self, term: Term) -> None:
        """The owner speaks under the term promised to this node: no other snapshot will come."""
        self.term, self.promised = term, None
        self.buffered.clear()
        self.closed_windows.clear()

    @property
    def buffered_bytes(self) -> int:
        return sum(item.delta.nbytes for item in self.buffered)


@dataclass(frozen=True, slots=True)
class KnownOwner:
    """Who owns a shard, as far as this node knows."""

    term: Term
    owner: Contact


@dataclass(frozen=True, slots=True)
class StoredState:
    """A state as this node last wrote it. `clean`: nothing was acknowledged after it, for the node left in order."""

    term: Term
    state: ShardState
    clean: bool

    @property
    def rank(self) -> tuple[Term, int]:
        return self.term, self.state.known_count
