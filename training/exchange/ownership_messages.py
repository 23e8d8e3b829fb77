"""Messages that move a shard: catch-up and hand-over, replica queries, take-overs, repair after a split. Pure.

The encoding is that of `training.exchange.messages`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from p2pnode.training.exchange.messages import MAX_CHANGES, MAX_DELTAS, Digest, PublicationId, Shards
from p2pnode.training.exchange.terms import (
    MAX_SHARDS,
    ZERO_TERM,
    Length,
    NodeId,
    Number,
    OwnerInfo,
    Role,
    ShardIndex,
    Term,
    TermNumber,
    Weight,
    Workers,
)
from p2pnode.training.shards.applied import Applied
from p2pnode.training.shards.robust import MAX_NORMS

#: Identities as rows: node, incarnation, ranges of steps. The number of rows bounds the starts of nodes that a shard
#: remembers.
Ranges = Annotated[list[tuple[Number, Number]], Meta(max_length=Applied.MAX_RANGES)]
Identities = Annotated[list[tuple[NodeId, Number, Ranges]], Meta(max_length=65536)]
#: Of a model's integer buffers; with their message they fit a head.
MAX_BUFFERS_BYTES = 1_000_000
#: Rows of identities in one `request_repair`.
MAX_SOUGHT = 8192
#: Pending deltas of one state.
MAX_PENDING = 1 << 16
#: Deltas about which an owner is asked at once.
MAX_ASKED = 1024
#: The receiver copies each state for its answer.
MAX_FETCHED = 16


class ShardList(msgspec.Struct, frozen=True, array_like=True):
    """What a request or an answer is about, where its name says the rest (docs/protocol.md): `query_replicas`,
    `request_takeover`, `backing`, `offer_repair`, `state`, and the answers to `offer_repair` and `fetch`.

    Of each shard a body of states has a `RECORD` with its `StateHead`, then `VALUE`, unless that names a
    publication, then `MOMENTUM`, then one `PENDING` per pending delta; the answer to `offer_repair` has a `RECORD` with
    its `OwnedHistory`.
    """

    shards: Shards


class Learn(msgspec.Struct, frozen=True, array_like=True):
    """Begins a catch-up: the receiver buffers forwards of these shards until their states follow by `state`.

    `attempts` are the numbers of the terms promised for them; a request with an older number than the last is ignored.
    """

    shards: Annotated[list[OwnerInfo], Meta(max_length=MAX_SHARDS)]
    attempts: Annotated[list[TermNumber], Meta(max_length=MAX_SHARDS)]


class StateHead(msgspec.Struct, frozen=True, array_like=True):
    """A shard's state without its arrays; `pending` lists (node, incarnation, step, weight, momentum, plain)."""

    shard: ShardIndex
    term: Term
    version: Number
    sum_weight: Annotated[float, Meta(ge=0, le=1)]
    era_step: Number
    folded_step: Number
    has_momentum: bool
    applied: Identities
    pending: Annotated[list[tuple[NodeId, Number, Number, Weight, bool, bool]], Meta(max_length=MAX_PENDING)]
    era_term: Term = ZERO_TERM
    norms: Annotated[list[tuple[NodeId, Number, Number, Length]], Meta(max_length=MAX_NORMS)] = []
    #: With the name of a publication no `VALUE` travels: it is the first published value of that publication, which the
    #: receiver has said that it holds.
    publication: PublicationId = b""
    #: How many deltas the value has that are not in `applied`.
    unlisted: Number = 0
    #: Steps below this of a start that `applied` does not list may be in the value.
    before: Number = 0


class PublishedHead(msgspec.Struct, frozen=True, array_like=True):
    """A shard's published value, for the node that owns the shard next; an empty `publication`: there is none.

    `version` and rank are those of the state that the value is near to. Of the changes that lead to `published` the
    last follow in the body, as many as `changes` says, for a receiver whose replica lacks them.
    """

    publication: PublicationId = b""
    published: Number = 0
    digest: Digest = b""
    version: Number = 0
    rank: Term = ZERO_TERM
    changes: Annotated[int, Meta(ge=0, le=MAX_CHANGES)] = 0


class HandOver(msgspec.Struct, frozen=True, array_like=True):
    """Makes the receiver, a backup that lacks nothing, the owner under the given terms.

    `known` counts the sender's deltas of each shard: it becomes the backup only if the receiver has as many.
    `published`: per shard the value that its followers hold; its changes follow in the body, in the order
    of the shards.
    """

    shards: Annotated[list[OwnerInfo], Meta(max_length=MAX_SHARDS)]
    known: Annotated[list[Number], Meta(max_length=MAX_SHARDS)]
    published: Annotated[list[PublishedHead], Meta(max_length=MAX_SHARDS)] = []


class CopyDigest(msgspec.Struct, frozen=True, array_like=True):
    """A shard as its owner has it at the end of training: the deltas that are visible, and a digest of the value."""

    shard: ShardIndex
    term: Term
    folded_step: Number
    version: Number
    digest: Annotated[bytes, Meta(min_length=16, max_length=16)]


class CompareCopies(msgspec.Struct, frozen=True, array_like=True):
    """Asks the backup of shards which of its copies have the same bits, once it has made the same deltas visible."""

    copies: Annotated[list[CopyDigest], Meta(max_length=MAX_SHARDS)]


class FinalDone(msgspec.Struct, frozen=True, array_like=True):
    """The sender has its final values: no owner need stay for it."""


class FinalBuffers(msgspec.Struct, frozen=True, array_like=True):
    """Asks the owner of the first shard for the model's integer buffers that all nodes take, encoded by its trainer's
    daemon. With `buffers`, the owner asks its backup to keep these."""

    buffers: Annotated[bytes, Meta(max_length=MAX_BUFFERS_BYTES)] | None = None


class FinalBuffersAnswer(msgspec.Struct, frozen=True, array_like=True):
    """None: the receiver does not own that shard, has not finished, or has no backup that keeps them yet."""

    buffers: Annotated[bytes, Meta(max_length=MAX_BUFFERS_BYTES)] | None = None


class TransferResult(msgspec.Struct, frozen=True, array_like=True):
    """Answer to `Learn`, `state`, `HandOver`, `backing` and `CompareCopies`: the shards taken
    (or confirmed, or equal), and the known owners of the others.

    To `Learn`, `publications` names for each shard taken the publication whose first published value the sender holds;
    empty: none.
    """

    taken: Shards
    others: Annotated[list[OwnerInfo], Meta(max_length=MAX_SHARDS)]
    publications: Annotated[list[PublicationId], Meta(max_length=MAX_SHARDS)] = []


class CopyStatus(msgspec.Struct, frozen=True, array_like=True):
    """A node's best copy of a shard. Its role is `owner`, `backup`, `learner`, `replica` or `none`. A `learner` has the
    state but is not promoted; a `replica` is a pulled value, or a state from disk.

    `fence` is the highest term that the node has seen for the shard; `is_stored`: the copy is the state from disk.
    """

    shard: ShardIndex
    role: Role
    term: Term
    version: Number
    fence: Term
    step: Number
    is_stored: bool = False


class ReplicasAnswer(msgspec.Struct, frozen=True, array_like=True):
    """`known`: the owners that the receiver knows; in a large swarm the sender may never have met an owner."""

    statuses: Annotated[list[CopyStatus], Meta(max_length=MAX_SHARDS)]
    known: Annotated[list[OwnerInfo], Meta(max_length=MAX_SHARDS)] = []


class Fetch(msgspec.Struct, frozen=True, array_like=True):
    """Asks for the receiver's copies of these shards, as `state`."""

    shards: Annotated[list[ShardIndex], Meta(max_length=MAX_FETCHED)]


class OwnedHistory(msgspec.Struct, frozen=True, array_like=True):
    """`owner`: the receiver owns the shard under the given term, and `known` are all its identities, which its backup
    has too. `not_owner` (`where` may name the owner) and `retry` (no backup yet) leave open what it has.

    `known_count`: how many deltas the state has; `unlisted`: how many of them `known` never listed, for it began as a
    replica. `before`: steps below it of a start that `known` does not list may be in the state.
    """

    shard: ShardIndex
    status: Literal["owner", "not_owner", "retry"]
    term: Term = ZERO_TERM
    era_step: Number = 0
    era_term: Term = ZERO_TERM
    known: Identities = []
    owner_info: OwnerInfo | None = None
    known_count: Number = 0
    unlisted: Number = 0
    before: Number = 0

    def known_deltas(self) -> Applied:
        """The deltas of the state."""
        return Applied.of_rows(self.known, self.before)


class LoggedDelta(msgspec.Struct, frozen=True, array_like=True):
    """One delta of one shard from a repair log, as it was added on the sender's side when `workers` trained there."""

    shard: ShardIndex
    node: NodeId
    incarnation: Number
    step: Number
    weight: Weight
    workers: Workers


class FindDeltas(msgspec.Struct, frozen=True, array_like=True):
    """Asks whether the receiver's log has any of these deltas: (node, incarnation, ranges of steps).

    Former owners and backups may have deltas that the present pair's logs do not reach.
    """

    shard: ShardIndex
    identities: Identities


class FoundDeltas(msgspec.Struct, frozen=True, array_like=True):
    """The deltas found; one `DELTA` array each follows in the body, in that order."""

    deltas: Annotated[list[LoggedDelta], Meta(max_length=MAX_DELTAS)]


class OfferedDeltas(msgspec.Struct, frozen=True, array_like=True):
    """Deltas that the receiver lacks; one `DELTA` array each follows in the body, in that order."""

    deltas: Annotated[list[LoggedDelta], Meta(max_length=MAX_DELTAS)]


class OfferedDeltasAnswer(msgspec.Struct, frozen=True, array_like=True):
    """How many of the deltas the receiver has now; `refused` are the places in the request of those that it will never
    take. The others are offered again."""

    added: Number
    refused: Annotated[list[Annotated[int, Meta(ge=0, lt=MAX_DELTAS)]], Meta(max_length=MAX_DELTAS)] = []


class AskedDelta(msgspec.Struct, frozen=True, array_like=True):
    """One shard of a delta of the sender."""

    shard: ShardIndex
    step: Number
    base_step: Number


class FindLacking(msgspec.Struct, frozen=True, array_like=True):
    """Which of these deltas of the sender do the shards of the receiver lack? An owner has acknowledged them."""

    incarnation: Number
    deltas: Annotated[list[AskedDelta], Meta(max_length=MAX_ASKED)]


class LackingDeltas(msgspec.Struct, frozen=True, array_like=True):
    """The shards that the receiver does not own, and the places in the question of the deltas that its shards certainly
    lack: of deltas with a base before the era of a shard it cannot tell."""

    not_owned: Annotated[list[ShardIndex], Meta(max_length=MAX_ASKED)]
    lacking: Annotated[list[Annotated[int, Meta(ge=0, lt=MAX_ASKED)]], Meta(max_length=MAX_ASKED)]
