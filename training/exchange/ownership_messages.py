"""Messages that move a shard: catch-up and hand-over, surveys and take-overs, reconciliation after a split. Pure.

The encoding is that of `training.exchange.messages`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from training.exchange.messages import MAX_DELTAS, Shards, Windows
from training.exchange.terms import (
    MAX_SHARDS,
    Genesis,
    Length,
    NodeId,
    Number,
    OwnerInfo,
    Role,
    ShardIndex,
    Term,
    TermNode,
    Weight,
)
from training.shards.robust import MAX_NORMS

#: Identities as rows: node, incarnation, ranges of steps. As many rows as a swarm may have starts of nodes within the
#: memory of one shard; ranges as `Applied.MAX_RANGES` allows, twice over for a difference of two.
Ranges = Annotated[list[tuple[int, int]], Meta(max_length=64)]
Identities = Annotated[list[tuple[NodeId, Number, Ranges]], Meta(max_length=65536)]
#: States are fetched one by one, and each is copied for the answer.
MAX_FETCHED = 16


class Learn(msgspec.Struct, frozen=True, array_like=True):
    """From now on the receiver takes live forwards of these shards; their states follow by `StateTransfer`.

    `attempts` are the numbers of the terms promised for them: an older call than the last one heard means nothing.
    """

    genesis: Genesis
    shards: Annotated[list[OwnerInfo], Meta(max_length=MAX_SHARDS)]
    attempts: Annotated[list[Number], Meta(max_length=MAX_SHARDS)]


class StateHead(msgspec.Struct, frozen=True, array_like=True):
    """A shard's state without its arrays; `pending` lists (node, incarnation, step, weight, momentum)."""

    shard: ShardIndex
    term_number: Number
    term_node: TermNode
    version: Number
    sum_weight: float
    era_step: Number
    folded_step: Number
    has_momentum: bool
    applied: Identities
    pending: Annotated[list[tuple[NodeId, Number, Number, Weight, bool]], Meta(max_length=MAX_DELTAS)]
    era_term: tuple[Number, TermNode] = (0, b"")
    norms: Annotated[list[tuple[NodeId, Number, Number, Length]], Meta(max_length=MAX_NORMS)] = []

    @property
    def term(self) -> Term:
        return Term(self.term_number, self.term_node)


class StateTransfer(msgspec.Struct, frozen=True, array_like=True):
    """Whole states; per shard `VALUE`, then `MOMENTUM` and `ACCUMULATED`, then one `PENDING` per held delta."""

    genesis: Genesis
    states: Annotated[list[StateHead], Meta(max_length=MAX_SHARDS)]


class HandOver(msgspec.Struct, frozen=True, array_like=True):
    """The receiver, a backup that has everything, is the owner under the terms given.

    `known` counts the deltas the sender has of each shard: it becomes the backup only where the receiver has no more.
    `closed_windows`: per shard the windows that the receiver may not have heard of.
    """

    genesis: Genesis
    shards: Annotated[list[OwnerInfo], Meta(max_length=MAX_SHARDS)]
    known: Annotated[list[Number], Meta(max_length=MAX_SHARDS)]
    closed_windows: Annotated[list[Windows], Meta(max_length=MAX_SHARDS)] = []


class Release(msgspec.Struct, frozen=True, array_like=True):
    """The receiver is no backup of these shards any more: they have another one under the terms given."""

    genesis: Genesis
    shards: Annotated[list[OwnerInfo], Meta(max_length=MAX_SHARDS)]


class ConfirmBackup(msgspec.Struct, frozen=True, array_like=True):
    """The sender has copies of these shards as the receiver's backup: does the receiver count on them?"""

    genesis: Genesis
    shards: Shards


class TransferResult(msgspec.Struct, frozen=True, array_like=True):
    """Answer to `Learn`, `StateTransfer`, `HandOver`, `Release` and `ConfirmBackup`: the shards taken (or counted on),
    and what the receiver knows of the others."""

    taken: Shards
    others: Annotated[list[OwnerInfo], Meta(max_length=MAX_SHARDS)]


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

    statuses: Annotated[list[CopyStatus], Meta(max_length=MAX_SHARDS)]
    known: Annotated[list[OwnerInfo], Meta(max_length=MAX_SHARDS)] = []


class Fetch(msgspec.Struct, frozen=True, array_like=True):
    """Send what you have of these shards, as `StateTransfer`."""

    genesis: Genesis
    shards: Annotated[list[ShardIndex], Meta(max_length=MAX_FETCHED)]


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
    histories: Annotated[list[OwnedHistory], Meta(max_length=MAX_SHARDS)]


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

    deltas: Annotated[list[Mended], Meta(max_length=MAX_DELTAS)]


class Mend(msgspec.Struct, frozen=True, array_like=True):
    """Deltas that the receiver lacks; one `DELTA` array each follows in the body, in that order."""

    genesis: Genesis
    deltas: Annotated[list[Mended], Meta(max_length=MAX_DELTAS)]


class MendAnswer(msgspec.Struct, frozen=True, array_like=True):
    """How many are in now; the others are offered again."""

    added: Number


class TakeoverRequest(msgspec.Struct, frozen=True, array_like=True):
    """These shards seem to have no living owner; the receiver looks, and takes over where it is its turn."""

    genesis: Genesis
    shards: Shards
