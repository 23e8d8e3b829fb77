"""How often the shards of a run have been divided, as far as one node knows, and how nodes hear of it.

Every message of the exchange names the division by its genesis (`exchange_genesis`), because its shards are those of
that division. A node that receives a finer one divides its own shards, and answers nothing before. One that receives a
coarser one refuses it, and says into how many parts (`refusal`). Two divisions by powers of two are always one of the
other, so it does not matter who divides first, or that two nodes do so at once.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

from training.shard_count import MAX_SHARDS

#: The beginning of a refusal, with the number of parts after it: the only part of its text with a meaning.
DIVIDED = "shards were divided; parts of each: "
#: A request that came while this node divides its shards: the sender asks again.
DIVIDING = "this node divides its shards: ask again"
OTHER_SWARM = "another swarm: the genesis differs"


def exchange_genesis(run_genesis: bytes, shard_parts: int) -> bytes:
    """The genesis in the messages of the exchange: that of the run, and another one for each division of its shards. So
    what a node says that has missed a division is never taken for something about other shards."""
    if shard_parts == 1:
        return run_genesis
    return hashlib.blake2b(shard_parts.to_bytes(2, "big"), digest_size=16, key=run_genesis, person=b"divided").digest()


class Divisions:
    """`parts`: into how many parts each shard was divided since the run began. `wanted`: into how many it is to be."""

    def __init__(self, run_genesis: bytes, parts: int) -> None:
        self.parts = self.wanted = parts
        self._run_genesis = run_genesis
        self._is_wanted = asyncio.Event()
        #: Whether this node can divide its shards into so many parts of each that the run began with.
        self.can_divide: Callable[[int], bool] = lambda _parts: False
        self._known: dict[bytes, int] = {}
        self._note()

    def _note(self) -> None:
        """Compute the genesis of every division that may be met."""
        odd = self.parts // (self.parts & -self.parts)
        found = [odd << power for power in range(MAX_SHARDS.bit_length()) if odd << power <= MAX_SHARDS]
        self._known = {exchange_genesis(self._run_genesis, parts): parts for parts in found}

    @property
    def genesis(self) -> bytes:
        """That of this node's messages."""
        return exchange_genesis(self._run_genesis, self.parts)

    def parts_in(self, genesis: bytes) -> int:
        """The division that a message names; 0 for one of another swarm, or of a division that this one cannot
        become."""
        return self._known.get(genesis, 0)

    def want(self, parts: int) -> bool:
        """Divide into so many parts, as soon as nothing of this node is in the way; False if this node cannot."""
        if parts <= self.wanted:
            return parts > self.parts
        if parts % self.parts or not self.can_divide(parts):
            return False
        self.wanted = parts
        self._is_wanted.set()
        return True

    def reached(self, parts: int) -> None:
        """The shards of this node are divided into so many parts."""
        self.parts = parts
        if self.wanted <= parts:
            self.wanted = parts
            self._is_wanted.clear()

    def give_up(self) -> None:
        """This node can divide its shards no more."""
        self.can_divide = lambda _parts: False
        self.wanted = self.parts
        self._is_wanted.clear()

    async def wait(self) -> None:
        """Until more parts are wanted than there are."""
        await self._is_wanted.wait()

    def refusal(self, genesis: bytes) -> str:
        """Why a message under another genesis is refused; empty if it is of another swarm, and its sender foreign. One
        of a finer division makes this node divide."""
        theirs = self.parts_in(genesis)
        if theirs and theirs < self.parts:
            return f"{DIVIDED}{self.parts}"
        return DIVIDING if theirs and self.want(theirs) else ""

    def told(self, reason: str) -> None:
        """A request of this node was refused for this reason."""
        if reason.startswith(DIVIDED) and reason[len(DIVIDED) :].isdecimal() and len(reason) < len(DIVIDED) + 6:
            self.want(int(reason[len(DIVIDED) :]))
