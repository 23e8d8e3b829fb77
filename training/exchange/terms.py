"""Terms, fences, and the scalar types that the store and the messages share. Pure."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Contact
from p2pnode.training import shard_count
from p2pnode.training.shards.delta_range import MAX_LENGTH

#: A list with at most one entry per shard.
MAX_SHARDS = shard_count.MAX_SHARDS

NodeId = Annotated[bytes, Meta(min_length=20, max_length=20)]
ShardIndex = Annotated[int, Meta(ge=0, lt=MAX_SHARDS)]
#: What a swarm counts: steps, starts, versions, deltas. As many as `overlay.peers.Counter`.
Number = Annotated[int, Meta(ge=0, lt=1 << 48)]
#: A count that another node gives, and that this one goes on counting from: what follows it still fits a message.
MAX_BELIEVED = 1 << 47
#: The number of a term. It fits the signed 64 bits of a frame's header, with bits to spare.
TermNumber = Annotated[int, Meta(ge=0, lt=1 << 62)]
#: Far below one part of a million workers. A product of the smallest weight and the smallest scale is above 0.
Weight = Annotated[float, Meta(ge=1e-12, le=1e6)]
Workers = Annotated[float, Meta(ge=1, le=1e9)]
Scale = Annotated[float, Meta(ge=1e-100, le=1)]
#: The node that raised a term; empty where there is no term.
TermNode = Annotated[bytes, Meta(max_length=20)]
Genesis = Annotated[bytes, Meta(max_length=16)]
#: A delta's Euclidean length; a longer one is refused.
Length = Annotated[float, Meta(ge=0, le=MAX_LENGTH)]
#: The longest literal address, and the longest reason for a refusal.
Host = Annotated[str, Meta(max_length=45)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Reason = Annotated[str, Meta(max_length=200)]


class Term(NamedTuple):
    """A fencing token: the higher number wins; the id of the node that raised it separates simultaneous take-overs."""

    number: TermNumber
    node: TermNode


ZERO_TERM = Term(0, b"")
#: Each restart of a whole swarm begins a new generation: it raises the terms to the next multiple of this. A copy of an
#: earlier generation, on the disk of a node that comes later, ranks below everything that the swarm went on with.
GENERATION = 1 << 32


#: How many generations a term may be above every other that a node knows: a swarm is not started again more often while
#: one of its nodes is away.
MAX_GENERATIONS_AHEAD = 1024
#: No term is as high as this, and those that can follow it still fit a message.
TERM_LIMIT = 1 << 61


def generation_of(term: Term) -> int:
    """How many restarts of the whole swarm were before this term."""
    return term.number // GENERATION


class Fence(msgspec.Struct, frozen=True, array_like=True):
    """The highest term that the sender has seen for a shard whose known owner has a lower one.

    That owner must raise its term above it, or the sender will refuse its claims from now on.
    """

    shard: ShardIndex
    term: Term


class OwnerInfo(msgspec.Struct, frozen=True, array_like=True):
    """The owner of a shard, as far as the sender knows."""

    shard: ShardIndex
    term: Term
    owner: NodeId
    host: Host
    port: Port

    def contact(self) -> Contact:
        """The owner's contact; `ValueError` for a malformed address."""
        return Contact(self.owner, Address.checked(self.host, self.port))

    @classmethod
    def of(cls, shard: int, term: Term, owner: Contact) -> OwnerInfo:
        return cls(shard, term, owner.node_id, *owner.address)


Role = Literal["owner", "backup", "learner", "replica", "none"]
#: How the copies of a shard rank by role, under the same term.
ROLE_RANK: dict[Role, int] = {"owner": 4, "backup": 3, "learner": 2, "replica": 1, "none": 0}
