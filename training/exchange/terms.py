"""Terms, fences and known owners of all shards, as one node has seen them; the scalar types of the messages.

A fence is the highest term seen for a shard. Claims below it are ignored, so that an owner which was replaced during a
partition cannot return. Of two claims the one with the higher term wins; a term has only one owner. The fences are kept
on the disk (`FenceFile`); all else is pure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.environment import Environment
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


@dataclass(frozen=True, slots=True)
class KnownOwner:
    """The owner of a shard, as far as this node knows."""

    term: Term
    owner: Contact


class Ownership:
    """The owner of each shard, as far as this node knows, and the lowest term that this node accepts."""

    def __init__(self, shard_count: int) -> None:
        self._shard_count = shard_count
        self.known_owners: dict[int, KnownOwner] = {}
        #: The highest term seen per shard; `FenceFile` keeps them over a restart.
        self.fences: dict[int, Term] = {}
        #: The highest number of any term seen; 0 while this node knows none.
        self._highest = 0

    # -- fences -------------------------------------------------------------------------------------------------

    def fence(self, shard: int) -> Term:
        """The highest term seen for a shard."""
        return self.fences.get(shard, ZERO_TERM)

    def is_plausible(self, term: Term) -> bool:
        """Whether a term can have come about in this swarm, as far as this node knows its terms.

        A term rises by one with every change of owner and backup, and by one generation with every start of the whole
        swarm. A node that knows no term accepts any below `TERM_LIMIT`, which leaves room for later terms.
        """
        if not self._highest:
            return term.number < TERM_LIMIT
        return generation_of(term) <= self._highest // GENERATION + MAX_GENERATIONS_AHEAD and term.number < TERM_LIMIT

    def admits(self, shard: int, term: Term) -> bool:
        """Whether a message under this term is accepted: the term is plausible and not below the fence."""
        return term >= self.fence(shard) and self.is_plausible(term)

    def raise_fence(self, shard: int, term: Term) -> None:
        """Remember a term; lower ones are refused from now on."""
        if term > self.fence(shard):
            self.fences[shard] = term
            self._highest = max(self._highest, term.number)

    def stale_fences(self, shards: Iterable[int]) -> list[Fence]:
        """The fences of those shards whose known owner has a lower term, or which have no known owner."""
        found = []
        for shard in shards:
            known, fence = self.known_owners.get(shard), self.fence(shard)
            if fence > (ZERO_TERM if known is None else known.term):
                found.append(Fence(shard, fence))
        return found

    # -- known owners -------------------------------------------------------------------------------------------

    def accept(self, shard: int, term: Term, owner: Contact) -> bool:
        """Record a claim of ownership unless its term is too low; True when the known owner changed."""
        if not 0 <= shard < self._shard_count or not self.admits(shard, term):
            return False
        known = self.known_owners.get(shard)
        if known is not None:
            # Under the same term only the address of the same owner may change.
            is_same = term == known.term
            if term < known.term or (is_same and (known.owner == owner or known.owner.node_id != owner.node_id)):
                return False
        self.assign(shard, term, owner)
        return True

    def assign(self, shard: int, term: Term, owner: Contact) -> None:
        """Record the owner of a shard without checks."""
        self.known_owners[shard] = KnownOwner(term, owner)
        self.raise_fence(shard, term)

    def forget_node(self, node_id: bytes) -> None:
        """Forget every claim of a node that has restarted and owns nothing now."""
        for shard, known in list(self.known_owners.items()):
            if known.owner.node_id == node_id:
                del self.known_owners[shard]


FENCES_FILE = "fences.msgpack"
_Rows = Annotated[dict[ShardIndex, Term], Meta(max_length=MAX_SHARDS)]


class FenceFile:
    """Loads them, and writes them when they change."""

    def __init__(self, ownership: Ownership, genesis: bytes, environment: Environment) -> None:
        self._ownership = ownership
        self._genesis = genesis
        self._disk = environment.disk
        self._executor = environment.executor
        self._log = environment.log
        self._load()
        self._written = dict(ownership.fences)

    def _load(self) -> None:
        raw = self._disk.read(FENCES_FILE)
        if raw is None:
            return
        try:
            genesis, rows = msgspec.msgpack.decode(raw, type=tuple[Genesis, _Rows])
        except msgspec.DecodeError as error:
            self._log.warning("fences_unreadable", reason=str(error))
            return
        if genesis == self._genesis:
            for shard, term in rows.items():
                if term.number < TERM_LIMIT:
                    self._ownership.raise_fence(shard, term)
                else:
                    self._log.warning("fence_passed_over", shard=shard)

    async def run(self) -> None:
        """Write the fences when they changed, at most once a second; retried until the disk takes them.

        Fences that a crash loses in between are found again by the replica query of a take-over.
        """
        failing = False
        while True:
            await asyncio.sleep(1.0)
            if (fences := dict(self._ownership.fences)) == self._written:
                continue
            try:
                data = msgspec.msgpack.encode((self._genesis, fences))
                await self._executor.run(self._disk.write, FENCES_FILE, data)
            except OSError as error:
                if not failing:
                    self._log.error("fences_not_written", reason=str(error))
                failing = True
            else:
                self._written, failing = fences, False
