"""Finding the owner of a shard: belief first, then questions, then an appeal to whoever should take over.

Beliefs come from answers and redirects. Where an owner is dead, silent or unknown, the candidates of the shard are
asked; where nobody living owns it, the first living candidate is told so.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable

from overlay.peers import Contact
from overlay.transport import TransportError
from training.exchange.core import Core
from training.exchange.messages import Appeal, Verdict, WhereAnswer, WhereIs

#: Small questions are answered at once or not at all.
QUESTION_TIMEOUT_S = 1.0
#: Candidates asked per shard; more are asked in later rounds because liveness has dropped the silent ones by then.
ASKED = 3


def shard_key(genesis: bytes, shard: int) -> bytes:
    """The point of the id space around which a shard's candidates live: SHA-1(genesis, shard) (DESIGN section 4)."""
    return hashlib.sha1(genesis + shard.to_bytes(4, "big"), usedforsecurity=False).digest()


class Finding:
    """Resolves shards to owners for pushing and pulling."""

    def __init__(self, core: Core) -> None:
        self._core = core
        #: Called with shards that have no living owner when this node is the first living candidate.
        self.orphans: dict[int, None] = {}

    def by_owner(self, shards: Iterable[int]) -> tuple[list[tuple[Contact, list[int]]], list[int]]:
        """Shards grouped by believed living owner, in an order rotated by this node's id so that nodes do not all
        begin with the same owner; and the shards without one."""
        groups: dict[bytes, tuple[Contact, list[int]]] = {}
        unknown = []
        me = self._core.overlay.node_id
        for shard in shards:
            belief = self._core.store.beliefs.get(shard)
            if belief is None or (belief.owner.node_id == me and shard not in self._core.store.owned):
                unknown.append(shard)
                continue
            owner = belief.owner
            if self._core.gone(owner.node_id):
                unknown.append(shard)
                continue
            known = self._core.overlay.contact(owner.node_id)
            groups.setdefault(owner.node_id, (known or owner, []))[1].append(shard)
        order = sorted(groups)
        turn = next((place for place, node in enumerate(order) if node >= me), 0)
        return [groups[node] for node in order[turn:] + order[:turn]], unknown

    def failed(self, owner: Contact, error: TransportError) -> None:
        """An owner did not answer: liveness looks at it at once, and the others are asked about its shards."""
        self._core.overlay.suspect(owner.node_id, error.detail)
        self._core.failures[owner.node_id] = self._core.clock.monotonic()
        self._core.log.debug("owner_failed", owner=owner.node_id.hex()[:8], kind=error.kind, reason=error.detail)

    async def candidates(self, shard: int) -> list[Contact]:
        """The shard's eligible candidates, best first; this node among them where it is one."""
        return await self._core.overlay.candidates(shard_key(self._core.genesis, shard))

    async def learn_all(self, source: Contact) -> None:
        """Ask one node for every owner it knows. Raises `TransportError`."""
        question = WhereIs(self._core.genesis, [], [])
        answer = await self._core.ask(source, "where_is", question, WhereAnswer, QUESTION_TIMEOUT_S)
        self._core.store.note(answer.known)

    async def refresh(self, shards: list[int]) -> None:
        """Ask about shards whose owner is unknown, dead, or has just failed to answer."""
        now = self._core.clock.monotonic()
        doubtful = [shard for shard in shards if self._doubtful(shard, now)]
        if not doubtful:
            return
        asked: dict[bytes, tuple[Contact, list[int]]] = {}
        first: dict[int, Contact | None] = {}
        for shard in doubtful:
            found = await self.candidates(shard)
            living = [contact for contact in found if not self._core.overlay.is_suspect(contact.node_id)]
            first[shard] = living[0] if living else None
            for contact in living[:ASKED]:
                if contact.node_id != self._core.overlay.node_id:
                    asked.setdefault(contact.node_id, (contact, []))[1].append(shard)
        await asyncio.gather(*(self._ask(contact, theirs) for contact, theirs in asked.values()))
        await self._appeal({shard: to for shard, to in first.items() if self._ownerless(shard)})

    def _doubtful(self, shard: int, now: float) -> bool:
        if self._ownerless(shard):
            return True
        belief = self._core.store.beliefs[shard]
        return now - self._core.failures.get(belief.owner.node_id, -60.0) < 2.0

    def _ownerless(self, shard: int) -> bool:
        belief = self._core.store.beliefs.get(shard)
        if belief is None:
            return True
        owner = belief.owner.node_id
        if owner == self._core.overlay.node_id:
            return shard not in self._core.store.owned
        return self._core.gone(owner)

    async def _ask(self, contact: Contact, shards: list[int]) -> None:
        known = [where for shard in shards if (where := self._core.store.where(shard)) is not None]
        question = WhereIs(self._core.genesis, shards, known)
        try:
            answer = await self._core.ask(contact, "where_is", question, WhereAnswer, QUESTION_TIMEOUT_S)
        except TransportError:
            return
        self._core.store.note(answer.known)

    async def _appeal(self, orphans: dict[int, Contact | None]) -> None:
        appeals: dict[bytes, tuple[Contact, list[int]]] = {}
        for shard, to in orphans.items():
            if to is None or to.node_id == self._core.overlay.node_id:
                self.orphans[shard] = None
            else:
                appeals.setdefault(to.node_id, (to, []))[1].append(shard)
        if self.orphans:
            self._core.wake()
        for contact, shards in appeals.values():
            try:
                message = Appeal(self._core.genesis, shards)
                await self._core.ask(contact, "appeal", message, Verdict, QUESTION_TIMEOUT_S)
            except TransportError:
                continue
