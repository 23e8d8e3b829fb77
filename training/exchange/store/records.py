"""What a node has recorded of one shard: as its owner, as its backup, or only its owner. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pnode.overlay.peers import Contact
from p2pnode.training.encoding.codecs import Encoded, Vector
from p2pnode.training.encoding.table import CodecName
from p2pnode.training.exchange.terms import Term
from p2pnode.training.shards.applied import DeltaId
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
    #: The shard came by a hand-over, so that the minimum time as owner (`exchange.tenure_s`) applies. It does not apply
    #: after genesis or a take-over: a young swarm may spread its shards at once.
    by_handover: bool = False
    #: After a take-over: the term of the copy that it began with, and how many deltas that copy had.
    first_copy: tuple[Term, int] | None = None

    @property
    def rank_term(self) -> Term:
        """The term by which the state ranks among copies of the shard.

        Until its first delta, a take-over ranks by the copy it began with. The copy of a later pair has more deltas,
        even under a lower term than the take-over's own.
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
class KnownOwner:
    """The owner of a shard, as far as this node knows."""

    term: Term
    owner: Contact


@dataclass(frozen=True, slots=True)
class StoredState:
    """A state as this node last wrote it. `clean`: no delta was acknowledged after it, for the node left in order."""

    term: Term
    state: ShardState
    clean: bool
