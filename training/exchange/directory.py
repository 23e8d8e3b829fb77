"""Finds the owners of shards: known owners first, then questions to candidates, then a request to take over.

Answers and redirects name owners. If an owner is dead, silent or unknown, the candidates of the shard are asked. If no
living node owns the shard, the first living candidate is asked to take it over.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Protocol

from overlay.peers import Activity, Contact
from overlay.transport import TransportError
from training.exchange.context import ExchangeContext
from training.exchange.messages import LocateOwners, LocateOwnersAnswer
from training.exchange.ownership_messages import TakeoverRequest, TransferResult
from training.exchange.store.copies import has_state
from training.exchange.terms import ZERO_TERM, Fence, OwnerInfo, Term

#: For requests without bodies, which a living node answers at once.
QUESTION_TIMEOUT_S = 1.0
#: For small requests between an owner and its backups, for whose answer nothing else waits. On a full line they wait
#: behind everything else; the failure detector finds a dead partner before.
PARTNER_TIMEOUT_S = 3.0
#: After an owner denied that it owns a shard, claims of others that it does are ignored for this long.
DENIAL_S = 5.0
#: A request to an owner that failed this recently makes the owner doubtful.
RECENT_FAILURE_S = 2.0
#: In a swarm of more members what concerns a shard is told to its candidates only.
BROADCAST_MAX_PEERS = 20
#: Candidates asked per shard. By the next round the failure detector has removed the silent ones, so others follow.
CANDIDATES_ASKED = 3


class ShardAnswer(Protocol):
    """What the receiver of a request answers about one shard."""

    @property
    def shard(self) -> int: ...

    @property
    def owner_info(self) -> OwnerInfo | None:
        """The owner that the receiver knows."""
        ...

    @property
    def denies_ownership(self) -> bool:
        """Whether the receiver does not own the shard."""
        ...


@lru_cache(maxsize=1 << 13)
def shard_key(genesis: bytes, shard: int) -> bytes:
    """The point of the id space to which the ids of a shard's candidates are closest: SHA-1(genesis, shard)."""
    return hashlib.sha1(genesis + shard.to_bytes(4, "big"), usedforsecurity=False).digest()


class OwnerDirectory:
    """Maps shards to their owners."""

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        self._swarm = context.swarm
        self._store = context.store
        self._view = context.view
        self._rpc = context.rpc
        self._rebalance = context.rebalance
        self._clock = context.environment.clock
        self._log = context.environment.log
        #: Shards whose known owner denied it: shard → (term, owner, time).
        self._denials: dict[int, tuple[Term, bytes, float]] = {}
        #: Claims that were ignored because this node has seen a higher term.
        self._below: dict[int, OwnerInfo] = {}

    def by_owner(self, shards: Iterable[int]) -> tuple[list[tuple[Contact, list[int]]], list[int]]:
        """Shards grouped by known living owner, and the shards without one.

        The order of the groups starts at this node's id, so that nodes do not all begin with the same owner.
        """
        groups: dict[bytes, tuple[Contact, list[int]]] = {}
        owners: dict[bytes, Contact | None] = {}  # looked up once, not for each shard; None: gone
        unknown = []
        owned, known_owners, me = self._store.owned, self._store.ownership.known_owners, self._swarm.node_id
        denials = self._denials
        for shard in shards:
            known = known_owners.get(shard)
            if (
                known is None
                or (shard in denials and self._is_denied(shard))
                or (known.owner.node_id == me and shard not in owned)
            ):
                unknown.append(shard)
                continue
            node_id = known.owner.node_id
            if node_id not in owners:
                owners[node_id] = None if self._view.is_gone(node_id) else self._swarm.contact(node_id) or known.owner
            owner = owners[node_id]
            if owner is None:
                unknown.append(shard)
            else:
                groups.setdefault(node_id, (owner, []))[1].append(shard)
        if len(groups) < 2:
            return list(groups.values()), unknown
        order = sorted(groups)
        start = next((place for place, node in enumerate(order) if node >= me), 0)
        return [groups[node] for node in order[start:] + order[:start]], unknown

    def is_apart(self) -> bool:
        """Whether no shard has an owner in reach, nor any node that could be one, this node included. Then it trains by
        itself, and is no owner: the others would have another. One that has been started again is in reach when it has
        its vector."""
        if self._store.owned or self._swarm.is_eligible:
            return False
        joining: dict[bytes, None] = {}
        for peer in self._swarm.members():
            if peer.activity is Activity.JOINING:
                joining[peer.node_id] = None
            elif self._swarm.may_own(peer):
                return False
        return all(owner.node_id in joining for owner, _ in self.by_owner(range(len(self._store)))[0])

    def failed(self, owner: Contact, error: TransportError) -> None:
        """An owner did not answer: have it probed now, and ask other nodes about its shards.

        One that serves no exchange was started again and loads its model still: it denies whatever it owned.
        """
        self._swarm.suspect(owner.node_id, error.detail)
        self._view.note_failure(owner.node_id)
        if error.is_not_served:
            for shard in self._store.ownership.known_owners:
                self.denied(shard, owner)
        self._log.debug("owner_failed", owner=owner.node_id.hex()[:8], kind=error.kind, reason=error.detail)

    def answered(self, owner: Contact, results: Iterable[ShardAnswer]) -> None:
        """Learn from the answers of a known owner: one that redirects does not own.

        A redirect is followed only to a higher term. In every other case the next step is a new lookup, not the same
        question, so that redirects cannot form a cycle. Nobody redirects to itself but a node that holds others up.
        """
        for result in results:
            if result.denies_ownership and result.owner_info and result.owner_info.owner == owner.node_id:
                self._context.nonsense(owner.node_id, "redirect")
            info = result.owner_info
            if info is not None:
                self._store.note_owners([info])
            if result.denies_ownership:
                self.denied(result.shard, owner)

    def outdated(self, shard: int, owner: Contact, term: Term) -> None:
        """The known owner of a shard answered under a term below one that was seen here: it is to hear of that."""
        if term < self._store.ownership.fence(shard):
            self._below[shard] = OwnerInfo.of(shard, term, owner)

    def denied(self, shard: int, owner: Contact) -> None:
        """The known owner of a shard denied that it owns it."""
        known = self._store.ownership.known_owners.get(shard)
        if known is not None and known.owner.node_id == owner.node_id:
            self._denials[shard] = (known.term, owner.node_id, self._clock.monotonic())

    def _is_denied(self, shard: int) -> bool:
        denial = self._denials.get(shard)
        if denial is None or (known := self._store.ownership.known_owners.get(shard)) is None:
            return False
        term, owner, at = denial
        is_same = (term, owner) == (known.term, known.owner.node_id)
        return is_same and self._clock.monotonic() - at < DENIAL_S

    async def candidates(self, shard: int) -> list[Contact]:
        """The shard's eligible candidates, best first; this node is included where it is one."""
        return (await self.candidates_of_all([shard]))[0]

    async def candidates_of_all(self, shards: Sequence[int]) -> list[list[Contact]]:
        """`candidates` of several shards, which cost little more than one."""
        found = await self._swarm.candidates_of_all([shard_key(self._context.genesis, shard) for shard in shards])
        score, now, me = self._view.score, self._clock.monotonic(), self._swarm.node_id
        nodes = {contact.node_id for contacts in found for contact in contacts}
        heeded = {node for node in nodes if not score.is_ignored(node)}
        fit = {node for node in heeded if score.is_candidate(node) and not score.routes.is_unreached(node, now)}
        candidates = []
        for contacts in found:
            # Where nobody else is left, one that has failed is better than none.
            is_any_fit = any(contact.node_id in fit and contact.node_id != me for contact in contacts)
            admitted = fit if is_any_fit else heeded
            candidates.append([contact for contact in contacts if contact.node_id in admitted])
        return candidates

    async def hearers(self, shards: Iterable[int]) -> list[Contact]:
        """Whom to tell at once of an owner of these shards: the members of a small swarm, or the candidates."""
        members = self._swarm.members()
        hearers = {peer.node_id: peer.contact for peer in members} if len(members) <= BROADCAST_MAX_PEERS else {}
        for shard in shards if not hearers else ():
            hearers.update({contact.node_id: contact for contact in await self.candidates(shard)})
        hearers.pop(self._swarm.node_id, None)
        return list(hearers.values())

    async def learn_all(self, source: Contact) -> None:
        """Ask one node for every owner it knows. Two others are asked too, where some are known: the lowest terms are
        taken first, so that one member's terms which no history explains are refused. Raises `TransportError` if none
        of them answers."""
        others = [one for one in self._others() if one.node_id != source.node_id][: CANDIDATES_ASKED - 1]
        asked = [asyncio.ensure_future(self._all_owners(contact)) for contact in (source, *others)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        answers = [one for one in found if not isinstance(one, BaseException)]
        if not answers and isinstance(found[0], BaseException):
            raise found[0]
        for answer in sorted(answers, key=lambda infos: max((info.term for info in infos), default=ZERO_TERM)):
            self._store.note_owners(answer)

    async def _all_owners(self, contact: Contact) -> list[OwnerInfo]:
        """Every owner that a member knows. Raises `TransportError`."""
        question = LocateOwners(self._context.genesis, [], [])
        answer = await self._rpc.ask(contact, "where_is", question, LocateOwnersAnswer, QUESTION_TIMEOUT_S)
        return answer.known

    async def refresh(self, shards: list[int]) -> None:
        """Ask about shards whose owner is unknown, dead, or has just failed to answer."""
        doubtful = [shard for shard in shards if self._doubtful(shard)]
        if not doubtful:
            await self._send_fences()
            return
        asked: dict[bytes, tuple[Contact, list[int]]] = {}
        first: dict[int, Contact | None] = {}
        for shard in doubtful:
            found = await self.candidates(shard)
            living = [contact for contact in found if not self._swarm.is_suspect(contact.node_id)]
            first[shard] = living[0] if living else None
            for contact in living[:CANDIDATES_ASKED] or self._others():
                if contact.node_id != self._swarm.node_id:
                    asked.setdefault(contact.node_id, (contact, []))[1].append(shard)
        await asyncio.gather(*(self._ask(contact, theirs) for contact, theirs in asked.values()))
        await self._send_fences()
        await self._request_takeovers({shard: to for shard, to in first.items() if self._ownerless(shard)})

    def _others(self) -> list[Contact]:
        """A few eligible nodes: to be asked about a shard without a candidate. After a restart of a swarm of more nodes
        than a lookup finds, those near a shard may all be joining, and its owner is none of them."""
        known = [peer.contact for peer in self._view.heeded() if peer.eligible]
        random = self._context.environment.entropy.random
        return random.sample(known, min(CANDIDATES_ASKED, len(known)))

    def _doubtful(self, shard: int) -> bool:
        if self._ownerless(shard):
            return True
        known = self._store.ownership.known_owners[shard]
        return self._view.failed_within(known.owner.node_id, RECENT_FAILURE_S)

    def _ownerless(self, shard: int) -> bool:
        known = self._store.ownership.known_owners.get(shard)
        if known is None:
            return True
        owner = known.owner.node_id
        if owner == self._swarm.node_id:
            return shard not in self._store.owned
        return self._view.is_gone(owner) or self._is_denied(shard)

    async def _ask(self, contact: Contact, shards: list[int], fences: list[Fence] | None = None) -> bool:
        """Ask a node for the owners of shards; False if it does not answer."""
        ownership = self._store.ownership
        known = [info for shard in shards if (info := self._store.redirect(shard)) is not None]
        question = LocateOwners(self._context.genesis, shards, known, fences or ownership.stale_fences(shards))
        try:
            answer = await self._rpc.ask(contact, "where_is", question, LocateOwnersAnswer, QUESTION_TIMEOUT_S)
        except TransportError:
            return False
        self._note(contact, answer.known)
        return True

    def _note(self, contact: Contact, infos: Sequence[OwnerInfo]) -> None:
        """A member has named owners, itself perhaps."""
        self._store.note_owners(infos)
        for info in infos:
            if info.owner == contact.node_id and self._is_denied(info.shard):
                # It claims the term under which the known owner denied: the known owner was wrong.
                self._store.correct_owner(info.shard, info.term, contact)
            if info.shard < len(self._store) and info.term < self._store.ownership.fence(info.shard):
                self._below[info.shard] = info

    async def _send_fences(self) -> None:
        """Send fences to owners whose terms are below the ones seen here: they have no other way to learn of them."""
        below, self._below = self._below, {}
        asked: dict[bytes, tuple[Contact, list[int]]] = {}
        for shard, info in below.items():
            if info.owner == self._swarm.node_id or self._view.is_gone(info.owner):
                continue
            try:
                asked.setdefault(info.owner, (info.contact(), []))[1].append(shard)
            except ValueError:
                continue
        fence = self._store.ownership.fence
        fences = {shard: Fence(shard, *fence(shard)) for shard in below}
        jobs = [self._ask(contact, shards, [fences[shard] for shard in shards]) for contact, shards in asked.values()]
        await asyncio.gather(*jobs)
        self._below.clear()

    async def _request_takeovers(self, orphans: dict[int, Contact | None]) -> None:
        requests: dict[bytes, tuple[Contact, list[int]]] = {}
        for shard, to in orphans.items():
            if to is None and not has_state(self._store, shard):
                # No node that may own it is in reach, and this one has never owned or backed it up. Its owner may start
                # again, with its disk.
                continue
            if to is None or to.node_id == self._swarm.node_id:
                self._rebalance.take_over(shard)
            else:
                requests.setdefault(to.node_id, (to, []))[1].append(shard)
        if self._rebalance.has_orphans:
            self._rebalance.wake()
        for contact, shards in requests.values():
            try:
                message = TakeoverRequest(self._context.genesis, shards)
                await self._rpc.ask(contact, "appeal", message, TransferResult, QUESTION_TIMEOUT_S)
            except TransportError:
                continue
