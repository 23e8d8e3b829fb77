"""The words of the exchange: heads of requests and answers, as MessagePack through msgspec.

Every struct is checked on decoding (types, lengths of lists and texts); what a handler gets is typed. Arrays travel as
frames in the body (`training.encoding.frames`). `docs/protocol.md` describes the same messages. Pure.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from training.exchange.terms import (
    MOST_SHARDS,
    Fence,
    Genesis,
    Length,
    NodeId,
    Number,
    OwnerInfo,
    Reason,
    Role,
    ShardIndex,
    Term,
    TermNode,
    Weight,
)
from training.shards.applied import DeltaId
from training.shards.robust import MOST_NORMS

#: Identities as rows: node, incarnation, ranges of steps. As many rows as a swarm may have starts of nodes within the
#: memory of one shard; ranges as `Applied.MOST_RANGES` allows, twice over for a difference of two.
Ranges = Annotated[list[tuple[int, int]], Meta(max_length=64)]
Identities = Annotated[list[tuple[NodeId, Number, Ranges]], Meta(max_length=65536)]
Shards = Annotated[list[ShardIndex], Meta(max_length=MOST_SHARDS)]
#: Deltas of one `mend`, `seek` or held in one state; windows that a backup may have missed.
MOST_DELTAS = 65536
MOST_CLOSINGS = 1024
#: States are fetched one by one, and each is copied for the answer.
MOST_FETCHED = 16


class Push(msgspec.Struct, frozen=True, array_like=True):
    """A node's delta of one step, for the shards listed; one `DELTA` array each follows in the body, in that order."""

    genesis: Genesis
    node: NodeId
    incarnation: Number
    step: Number
    base_step: Number
    weight: Weight
    shards: Shards
    fences: Annotated[list[Fence], Meta(max_length=MOST_SHARDS)] = []


PushStatus = Literal["ok", "redirect", "retry", "refused"]
#: Why an owner refuses a delta for good, and why one is to be sent again.
RefusalReason = Literal["not_yours", "shape", "malformed", "not_finite", "late", "before_era"]
RetryReason = Literal[
    "owner_unknown", "no_backup_yet", "backup_silent", "moving", "leaving", "window_full", "no_norms_yet"
]


class PushResult(msgspec.Struct, frozen=True, array_like=True):
    """What became of one shard of a push; `reason` for `refused` and `retry`, `where` for `redirect`.

    A receiver accepts any reason, for a later version may have more of them.
    """

    shard: ShardIndex
    status: PushStatus
    version: Number = 0
    reason: Reason = ""
    where: OwnerInfo | None = None

    @classmethod
    def refused(cls, shard: int, reason: RefusalReason) -> PushResult:
        return cls(shard, "refused", reason=reason)

    @classmethod
    def retry(cls, shard: int, reason: RetryReason) -> PushResult:
        return cls(shard, "retry", reason=reason)

    @property
    def denies_ownership(self) -> bool:
        """Whether the receiver of the push does not own the shard."""
        owner_unknown: RetryReason = "owner_unknown"
        return self.status == "redirect" or (self.status == "retry" and self.reason == owner_unknown)


class PushAnswer(msgspec.Struct, frozen=True, array_like=True):
    results: Annotated[list[PushResult], Meta(max_length=MOST_SHARDS)]


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """A shard to be pulled, and what the puller has of it."""

    shard: ShardIndex
    term_number: Number
    term_node: TermNode
    version: Number


class Pull(msgspec.Struct, frozen=True, array_like=True):
    """Values wanted by a node that has passed the barrier of `step`; the frames of a joiner's carry checksums. With
    `takes_copies` a receiver that does not own a shard sends what it has of it."""

    genesis: Genesis
    step: Number
    codec: Literal["float32", "bfloat16"]
    shards: Annotated[list[Wanted], Meta(max_length=MOST_SHARDS)]
    fences: Annotated[list[Fence], Meta(max_length=MOST_SHARDS)] = []
    has_checksums: bool = False
    takes_copies: bool = False


class PullResult(msgspec.Struct, frozen=True, array_like=True):
    """`value`: the shard follows in the body, or a `copy` from one who does not own it; `same`: the puller has it.

    `worth` is the term by which the value ranks among copies of the shard, where that is not the owner's own: a
    take-over that has added nothing has nothing better than the copy it began with.
    """

    shard: ShardIndex
    status: Literal["value", "copy", "same", "redirect", "retry"]
    term_number: Number = 0
    term_node: TermNode = b""
    version: Number = 0
    where: OwnerInfo | None = None
    worth_number: Number = 0
    worth_node: TermNode = b""

    @property
    def term(self) -> Term:
        return Term(self.term_number, self.term_node)

    @property
    def denies_ownership(self) -> bool:
        """Whether the receiver of the pull does not own the shard."""
        return self.status in ("redirect", "retry")

    @property
    def worth(self) -> Term:
        return Term(self.worth_number, self.worth_node) if self.worth_number else self.term


class PullAnswer(msgspec.Struct, frozen=True, array_like=True):
    results: Annotated[list[PullResult], Meta(max_length=MOST_SHARDS)]


#: The identities of one window of the trimmed mean, and the windows of a shard, oldest first.
Closing = Annotated[list[DeltaId], Meta(max_length=MOST_DELTAS)]
Closings = Annotated[list[Closing], Meta(max_length=MOST_CLOSINGS)]


class Forwarded(msgspec.Struct, frozen=True, array_like=True):
    """One shard of a forward. `scale` is what the owner clipped it by, `norm` its length before; `closings` are the
    windows that the owner has made visible since the receiver last heard of one, oldest first."""

    shard: ShardIndex
    term_number: Number
    term_node: TermNode
    folded_step: Number
    scale: Annotated[float, Meta(gt=0, le=1)] = 1.0
    norm: Length = 0.0
    closings: Closings = []


class Forward(msgspec.Struct, frozen=True, array_like=True):
    """An owner's copy of a push for its backup or learner; `weight` is what the owner will apply."""

    genesis: Genesis
    node: NodeId
    incarnation: Number
    step: Number
    weight: Weight
    synchronous: bool
    shards: Annotated[list[Forwarded], Meta(max_length=MOST_SHARDS)]
    #: False for a delta out of a split: it moves the value only.
    momentum: bool = True


ForwardStatus = Literal["ok", "fenced", "unknown"]


class ForwardResult(msgspec.Struct, frozen=True, array_like=True):
    """`fenced`: this backup has seen a higher term (given); `unknown`: it does not back this shard."""

    shard: ShardIndex
    status: ForwardStatus
    term_number: Number = 0
    term_node: TermNode = b""


class ForwardAnswer(msgspec.Struct, frozen=True, array_like=True):
    results: Annotated[list[ForwardResult], Meta(max_length=MOST_SHARDS)]


class Learn(msgspec.Struct, frozen=True, array_like=True):
    """From now on the receiver takes live forwards of these shards; their states follow by `StateTransfer`.

    `attempts` are the numbers of the terms promised for them: an older call than the last one heard means nothing.
    """

    genesis: Genesis
    shards: Annotated[list[OwnerInfo], Meta(max_length=MOST_SHARDS)]
    attempts: Annotated[list[Number], Meta(max_length=MOST_SHARDS)]


class StateHead(msgspec.Struct, frozen=True, array_like=True):
    """The small part of a shard's state. `held` lists (node, incarnation, step, weight, momentum) of pending deltas."""

    shard: ShardIndex
    term_number: Number
    term_node: TermNode
    version: Number
    sum_weight: float
    era_step: Number
    folded_step: Number
    has_momentum: bool
    applied: Identities
    held: Annotated[list[tuple[NodeId, Number, Number, Weight, bool]], Meta(max_length=MOST_DELTAS)]
    era_term: tuple[Number, TermNode] = (0, b"")
    norms: Annotated[list[tuple[NodeId, Number, Number, Length]], Meta(max_length=MOST_NORMS)] = []

    @property
    def term(self) -> Term:
        return Term(self.term_number, self.term_node)


class StateTransfer(msgspec.Struct, frozen=True, array_like=True):
    """Whole states; per shard `VALUE`, then `MOMENTUM` and `ACCUMULATED`, then one `PENDING` per held delta."""

    genesis: Genesis
    states: Annotated[list[StateHead], Meta(max_length=MOST_SHARDS)]


class HandOver(msgspec.Struct, frozen=True, array_like=True):
    """The receiver, a backup that has everything, is the owner under the terms given.

    `known` counts the deltas the sender has of each shard: it becomes the backup only where the receiver has no more.
    `closings`: per shard the windows that the receiver may not have heard of.
    """

    genesis: Genesis
    shards: Annotated[list[OwnerInfo], Meta(max_length=MOST_SHARDS)]
    known: Annotated[list[Number], Meta(max_length=MOST_SHARDS)]
    closings: Annotated[list[Closings], Meta(max_length=MOST_SHARDS)] = []


class Release(msgspec.Struct, frozen=True, array_like=True):
    """The receiver is no backup of these shards any more: they have another one under the terms given."""

    genesis: Genesis
    shards: Annotated[list[OwnerInfo], Meta(max_length=MOST_SHARDS)]


class ConfirmBackup(msgspec.Struct, frozen=True, array_like=True):
    """The sender has copies of these shards as the receiver's backup: does the receiver count on them?"""

    genesis: Genesis
    shards: Shards


class TransferResult(msgspec.Struct, frozen=True, array_like=True):
    """Answer to `Learn`, `StateTransfer`, `HandOver`, `Release` and `ConfirmBackup`: the shards taken (or counted on),
    and what the receiver knows of the others."""

    taken: Shards
    others: Annotated[list[OwnerInfo], Meta(max_length=MOST_SHARDS)]


class LocateOwners(msgspec.Struct, frozen=True, array_like=True):
    """Who owns these shards? An empty list asks for all. Also used to tell: `known` is what the asker believes."""

    genesis: Genesis
    shards: Shards
    known: Annotated[list[OwnerInfo], Meta(max_length=MOST_SHARDS)]
    fences: Annotated[list[Fence], Meta(max_length=MOST_SHARDS)] = []


class LocateOwnersAnswer(msgspec.Struct, frozen=True, array_like=True):
    known: Annotated[list[OwnerInfo], Meta(max_length=MOST_SHARDS)]


class Survey(msgspec.Struct, frozen=True, array_like=True):
    """What do you have of these shards? Asked by a node that is about to take over."""

    genesis: Genesis
    shards: Shards


class CopyStatus(msgspec.Struct, frozen=True, array_like=True):
    """What a node has of a shard: `owner`, `backup` in office, `learner` (the state, but not in office yet), `replica`
    (a pulled value, or a state from disk), or `none`.

    `fence` is the highest term it has seen for the shard, whoever holds it; `is_stored`: the state from disk.
    """

    shard: ShardIndex
    role: Role
    term_number: Number
    term_node: TermNode
    version: Number
    fence_number: Number
    fence_node: TermNode
    step: Number
    is_stored: bool = False

    @property
    def term(self) -> Term:
        return Term(self.term_number, self.term_node)

    @property
    def fence(self) -> Term:
        return Term(self.fence_number, self.fence_node)


class SurveyAnswer(msgspec.Struct, frozen=True, array_like=True):
    """`known`: whom the receiver takes for the owners; in a large swarm an owner may be no candidate of the asker."""

    standings: Annotated[list[CopyStatus], Meta(max_length=MOST_SHARDS)]
    known: Annotated[list[OwnerInfo], Meta(max_length=MOST_SHARDS)] = []


class Fetch(msgspec.Struct, frozen=True, array_like=True):
    """Send what you have of these shards, as `StateTransfer`."""

    genesis: Genesis
    shards: Annotated[list[ShardIndex], Meta(max_length=MOST_FETCHED)]


class DeltaHistory(msgspec.Struct, frozen=True, array_like=True):
    """What has a node pushed in earlier starts, as far as the receiver's states tell? A node whose state directory was
    put back from a copy must use no identity twice."""

    genesis: Genesis
    node: NodeId


class DeltaHistoryAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The highest of each; 0 where there is nothing."""

    incarnation: Number
    step: Number


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """The sender lost these shards to the receiver's higher term. What does the receiver have of them?"""

    genesis: Genesis
    shards: Shards


class OwnedHistory(msgspec.Struct, frozen=True, array_like=True):
    """`owner`: the receiver owns the shard under the term given, and this is every identity it has, safe at its backup;
    `not_owner` (`where` may say who does) and `retry` (not safe yet) say nothing about what it has."""

    shard: ShardIndex
    status: Literal["owner", "not_owner", "retry"]
    term_number: Number = 0
    term_node: TermNode = b""
    era_step: Number = 0
    era_term: tuple[Number, TermNode] = (0, b"")
    known: Identities = []
    where: OwnerInfo | None = None

    @property
    def term(self) -> Term:
        return Term(self.term_number, self.term_node)


class OwnedHistories(msgspec.Struct, frozen=True, array_like=True):
    holdings: Annotated[list[OwnedHistory], Meta(max_length=MOST_SHARDS)]


class Mended(msgspec.Struct, frozen=True, array_like=True):
    """One delta of one shard out of a repair log, as it was added on the sender's side when `workers` trained there."""

    shard: ShardIndex
    node: NodeId
    incarnation: Number
    step: Number
    weight: Weight
    workers: Annotated[float, Meta(ge=1)]


class FindDeltas(msgspec.Struct, frozen=True, array_like=True):
    """Does the receiver's log have any of these deltas? (node, incarnation, first and last steps.) Owners and backups
    of before the present pair may have what its own log does not reach."""

    genesis: Genesis
    shard: ShardIndex
    identities: Identities


class FoundDeltas(msgspec.Struct, frozen=True, array_like=True):
    """What the log has; one `DELTA` array each follows in the body, in that order."""

    deltas: Annotated[list[Mended], Meta(max_length=MOST_DELTAS)]


class Mend(msgspec.Struct, frozen=True, array_like=True):
    """Deltas that the receiver lacks; one `DELTA` array each follows in the body, in that order."""

    genesis: Genesis
    deltas: Annotated[list[Mended], Meta(max_length=MOST_DELTAS)]


class MendAnswer(msgspec.Struct, frozen=True, array_like=True):
    """How many are in now; the others are offered again."""

    added: Number


class TakeoverRequest(msgspec.Struct, frozen=True, array_like=True):
    """These shards seem to have no living owner; the receiver looks, and takes over where it is its turn."""

    genesis: Genesis
    shards: Shards


S = TypeVar("S")


def decode(payload: bytes, kind: type[S]) -> S:
    """A checked message. Raises `msgspec.DecodeError` (`ValidationError` is one) for anything else."""
    return msgspec.msgpack.decode(payload, type=kind)


def encode(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)
