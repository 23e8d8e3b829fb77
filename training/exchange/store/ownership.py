"""Terms, fences and known owners of all shards, as one node has seen them. Pure.

A fence is the highest term seen for a shard. Claims below it are ignored, so that an owner which was replaced during a
partition cannot return. Of two claims the one with the higher term wins; a term has only one owner.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pnode.overlay.peers import Contact
from p2pnode.training.exchange.store.records import KnownOwner
from p2pnode.training.exchange.terms import (
    GENERATION,
    MAX_GENERATIONS_AHEAD,
    TERM_LIMIT,
    ZERO_TERM,
    Fence,
    OwnerInfo,
    Term,
    generation_of,
)


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

    def owner_info(self, shard: int) -> OwnerInfo | None:
        """The known owner of a shard in the form for the wire."""
        known = self.known_owners.get(shard)
        return None if known is None else OwnerInfo.of(shard, known.term, known.owner)
