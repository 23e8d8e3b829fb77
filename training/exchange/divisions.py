"""How often the shards of a run have been divided, as far as one node knows, and how nodes hear of it.

Every message of the exchange names the division by its genesis (`exchange_genesis`), because its shards are those of
that division. A node that receives a finer one divides its own shards, and answers nothing before. One that receives a
coarser one refuses it, and says into how many parts (`refusal`). Two divisions by powers of two are always one of the
other, so it does not matter who divides first, or that two nodes do so at once. A division that the size of the swarm
does not explain is followed when a second member has named it, or a finer one.
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
#: A request of a division that this node has heard of from one member only, and does not follow.
ONE_MEMBER = "this node has not divided its shards: only you say that they were"
OTHER_SWARM = "another swarm: the genesis differs"
#: Members whose divisions are remembered.
MOST_NAMED = 64


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
        #: Whether one member is believed that shards were divided into so many.
        self.is_expected: Callable[[int], bool] = lambda _parts: True
        #: The finest division that each member has named, of those that one alone is not believed.
        self._named: dict[bytes, int] = {}
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

    def refusal(self, genesis: bytes, node: bytes) -> str:
        """Why a message of a member under another genesis is refused; empty if it is of another swarm, and its sender
        foreign. One of a finer division makes this node divide."""
        theirs = self.parts_in(genesis)
        if theirs and theirs < self.parts:
            return f"{DIVIDED}{self.parts}"
        if not theirs or not self._follow(theirs, node):
            return ""
        return ONE_MEMBER if self.disbelieves(node) else DIVIDING

    def told(self, reason: str, node: bytes) -> None:
        """A request of this node was refused by a member, for this reason."""
        if reason.startswith(DIVIDED) and reason[len(DIVIDED) :].isdecimal() and len(reason) < len(DIVIDED) + 6:
            self._follow(int(reason[len(DIVIDED) :]), node)

    def _follow(self, parts: int, node: bytes) -> bool:
        """A member has divided its shards into so many parts; whether this node can, and then does or may yet."""
        if parts <= self.parts or parts % self.parts or not self.can_divide(parts):
            return False
        if not self.is_expected(parts):
            self._named.pop(node, None)
            self._named[node] = parts
            if len(self._named) > MOST_NAMED:
                del self._named[next(iter(self._named))]
            if sum(named >= parts for named in self._named.values()) < 2:
                return True
        self.want(parts)
        return True

    def disbelieves(self, node: bytes) -> bool:
        """Whether this member has named a division that this node does not follow."""
        return self._named.get(node, 0) > self.wanted

    def take_believed(self) -> list[bytes]:
        """The members that were not believed, and are since the last call."""
        found = [node for node, parts in self._named.items() if parts <= self.wanted]
        for node in found:
            del self._named[node]
        return found
