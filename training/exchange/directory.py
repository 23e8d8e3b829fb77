"""Finds the owners of shards, and ways to members that do not answer.

Answers and redirects name owners. If an owner is dead, silent or unknown, the candidates of the shard are asked. If no
living node owns the shard, the first living candidate is asked to take it over.

`PeerScore` says when a silent member is to be looked for, and what follows. Relays are looked for where this node
depends on the member: for owners, and partners of its own shards. Nothing is taken over while a relay is known
(`SwarmView.is_gone`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.peers import Activity, Contact
from p2pnode.overlay.transport import TransportError
from p2pnode.training.exchange.messages import LocateOwners, LocateOwnersAnswer
from p2pnode.training.exchange.ownership_messages import ShardList, TransferResult
from p2pnode.training.exchange.rpc import ExchangeRpc
from p2pnode.training.exchange.run_state import RebalanceRequests, SwarmView
from p2pnode.training.exchange.store.replica import has_state
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import KnownOwner, OwnerInfo
from p2pnode.training.exchange.timeouts import Obstacles, together
from p2pnode.training.swarm import Swarm

#: For small requests between an owner and its backups, for whose answer nothing else waits. On a full line they wait
#: behind everything else; the failure detector finds a dead partner before.
PARTNER_TIMEOUT_S = 3.0
#: After an owner denied that it owns a shard, claims of others that it does are ignored for this long.
DENIAL_S = 5.0
#: A request to an owner that failed this recently makes the owner doubtful.
RECENT_FAILURE_S = 2.0
#: Between two attempts, when new owners are looked for.
FIRST_RETRY_S, MAX_RETRY_S = 0.05, 0.5
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


@dataclass(eq=False)
class OwnerDirectory:
    """Maps shards to their owners."""

    swarm: Swarm
    store: ShardStore
    view: SwarmView
    rpc: ExchangeRpc
    rebalance: RebalanceRequests
    environment: Environment

    def __post_init__(self) -> None:
        self._clock = self.environment.clock
        self._random = self.environment.entropy.random
        #: Shards whose known owner denied it, with that owner and the time.
        self._denials: dict[int, tuple[KnownOwner, float]] = {}

    def by_owner(self, shards: Iterable[int]) -> tuple[list[tuple[Contact, list[int]]], list[int]]:
        """Shards grouped by known living owner, and the shards without one.

        The order of the groups starts at this node's id, so that nodes do not all begin with the same owner.
        """
        groups: dict[bytes, tuple[Contact, list[int]]] = {}
        gone: dict[bytes, bool] = {}  # looked up once, not for each shard
        unknown = []
        for shard in shards:
            known = self._claimed(shard)
            if known is None:
                unknown.append(shard)
                continue
            node_id = known.owner.node_id
            if node_id not in gone:
                gone[node_id] = self.view.is_gone(node_id)
            if gone[node_id]:
                unknown.append(shard)
            elif (group := groups.get(node_id)) is not None:
                group[1].append(shard)
            else:
                groups[node_id] = self.swarm.contact(node_id) or known.owner, [shard]
        me = self.swarm.node_id
        return [groups[node] for node in sorted(groups, key=lambda node: (node < me, node))], unknown

    async def ask_owners(
        self,
        shards: list[int],
        left: Container[int],
        ask: Callable[[Contact, list[int]], Awaitable[None]],
        obstacles: Obstacles,
    ) -> None:
        """Ask the owners of these shards until none of them is `left`, in the order of the shards. Several owners are
        asked at the same time, so that none waits for another. A shard whose owner changes is asked for there."""
        pause_s = FIRST_RETRY_S
        while now := [shard for shard in shards if shard in left]:
            groups, unknown = self.by_owner(now)
            unexplained = [shard for shard in unknown if shard not in obstacles]
            obstacles.note(unexplained, None, "no owner is known", self._clock.monotonic())
            if len(groups) + bool(unknown) > 1:
                parts = [theirs for _, theirs in groups] + ([unknown] if unknown else [])
                await together(self.ask_owners(part, left, ask, obstacles) for part in parts)
                return
            for owner, theirs in groups:
                await ask(owner, theirs)
            if after := [shard for shard in now if shard in left]:
                pause_s = FIRST_RETRY_S if len(after) < len(now) else pause_s
                await self.refresh(after, after_s=pause_s)
                pause_s = min(2 * pause_s, MAX_RETRY_S)

    def _claimed(self, shard: int) -> KnownOwner | None:
        """The known owner, unless it has denied that it owns the shard."""
        known = self.store.believed_owner(shard)
        return None if self._denials and self._is_denied(shard, known) else known

    def _is_denied(self, shard: int, known: KnownOwner | None) -> bool:
        denial = self._denials.get(shard)
        return denial is not None and denial[0] == known and self._clock.monotonic() - denial[1] < DENIAL_S

    def is_apart(self) -> bool:
        """Whether no shard has an owner in reach, nor any node that could be one, this node included. Then it trains by
        itself, and is no owner: the others would have another. One that has been started again is in reach when it has
        its vector."""
        if self.store.owned or self.swarm.is_eligible:
            return False
        joining: dict[bytes, None] = {}
        for peer in self.swarm.members():
            if peer.activity is Activity.JOINING:
                joining[peer.node_id] = None
            elif self.swarm.may_own(peer):
                return False
        return all(owner.node_id in joining for owner, _ in self.by_owner(range(len(self.store)))[0])

    # -- what requests show -------------------------------------------------------------------------------------

    def failed(self, owner: Contact, error: TransportError) -> None:
        """An owner did not answer: have it probed now, and ask other nodes about its shards.

        One that serves no exchange was started again and loads its model still: it denies whatever it owned.
        """
        self.swarm.suspect(owner.node_id, error.detail)
        if error.is_not_served:
            for shard in self.store.ownership.known_owners:
                self.denied(shard, owner)
        self.environment.log.debug("owner_failed", owner=owner.node_id.hex()[:8], kind=error.kind, reason=error.detail)

    def answered(self, owner: Contact, results: Iterable[ShardAnswer]) -> None:
        """Learn from the answers of a known owner: one that redirects does not own.

        A redirect is followed only to a higher term. In every other case the next step is a new lookup, not the same
        question, so that redirects cannot form a cycle.
        """
        for result in results:
            if result.owner_info is not None:
                self.store.note_owners([result.owner_info])
            if result.denies_ownership:
                self.denied(result.shard, owner)

    def denied(self, shard: int, owner: Contact) -> None:
        """The known owner of a shard denied that it owns it."""
        known = self.store.ownership.known_owners.get(shard)
        if known is not None and known.owner.node_id == owner.node_id:
            self._denials[shard] = known, self._clock.monotonic()

    # -- candidates ---------------------------------------------------------------------------------------------

    async def candidates(self, shards: Sequence[int]) -> list[list[Contact]]:
        """The eligible candidates of each shard, best first; this node is included where it is one."""
        found = await self.swarm.candidates_of_all([shard_key(self.rpc.genesis, shard) for shard in shards])
        score, me = self.view.score, self.swarm.node_id
        nodes = {contact.node_id for contacts in found for contact in contacts}
        not_quarantined = {node for node in nodes if not score.is_quarantined(node)}
        fit = {node for node in not_quarantined if not score.is_unreached(node)}
        candidates = []
        for contacts in found:
            # Where nobody else is left, one that has failed is better than none.
            is_any_fit = any(contact.node_id in fit and contact.node_id != me for contact in contacts)
            admitted = fit if is_any_fit else not_quarantined
            candidates.append([contact for contact in contacts if contact.node_id in admitted])
        return candidates

    def _others(self) -> list[Contact]:
        """A few eligible nodes: to be asked about a shard without a candidate. After a restart of a swarm of more nodes
        than a lookup finds, those near a shard may all be joining, and its owner is none of them."""
        known = [peer.contact for peer in self.view.not_quarantined() if peer.eligible]
        return self._random.sample(known, min(CANDIDATES_ASKED, len(known)))

    # -- questions ----------------------------------------------------------------------------------------------

    async def learn_all(self, source: Contact) -> None:
        """Ask one node for every owner it knows. Raises `TransportError`."""
        question = LocateOwners([], [])
        answer = await self.rpc.ask(source, "where_is", question, LocateOwnersAnswer)
        self.store.note_owners(answer.known)

    async def refresh(self, shards: list[int], *, after_s: float = 0.0) -> None:
        """Ask about shards whose owner is unknown, dead, or has just failed to answer; after about so many seconds, so
        that many nodes do not retry at the same moments."""
        if after_s:
            await asyncio.sleep(after_s * self._random.uniform(0.5, 1.5))
        asked: dict[Contact, list[int]] = {}
        first: dict[int, Contact | None] = {}
        doubtful = list(filter(self._is_doubtful, shards))
        for shard, found in zip(doubtful, await self.candidates(doubtful), strict=True):
            living = [contact for contact in found if not self.swarm.is_suspect(contact.node_id)]
            first[shard] = living[0] if living else None
            for contact in living[:CANDIDATES_ASKED] or self._others():
                asked.setdefault(contact, []).append(shard)
        below = await self._ask_all(asked)
        # Promise 1 (docs/faults.md): an owner below the fence has no other way to learn that this node refuses its
        # term.
        await self._ask_all({to: theirs for to, theirs in below.items() if not self.view.is_gone(to.node_id)})
        await self._request_takeovers({shard: to for shard, to in first.items() if self._is_ownerless(shard)})

    def _is_doubtful(self, shard: int) -> bool:
        if self._is_ownerless(shard):
            return True
        owner = self.store.ownership.known_owners[shard].owner
        return self.view.score.failed_within(owner.node_id, RECENT_FAILURE_S)

    def _is_ownerless(self, shard: int) -> bool:
        known = self._claimed(shard)
        if known is None or known.owner.node_id == self.swarm.node_id:
            return known is None
        return self.view.is_gone(known.owner.node_id)

    async def _ask_all(self, asked: dict[Contact, list[int]]) -> dict[Contact, list[int]]:
        """Ask nodes for owners; returns the shards of owners that claim a term below the highest one seen here."""
        below: dict[Contact, list[int]] = {}
        await asyncio.gather(*(self._ask(contact, shards, below) for contact, shards in asked.items()))
        return below

    async def _ask(self, contact: Contact, shards: list[int], below: dict[Contact, list[int]]) -> None:
        if contact.node_id == self.swarm.node_id:
            return
        store, ownership = self.store, self.store.ownership
        question = LocateOwners(shards, store.redirects(shards), ownership.stale_fences(shards))
        answer = await self.rpc.try_ask(contact, "where_is", question, LocateOwnersAnswer)
        if answer is None:
            return
        store.note_owners(answer.known)
        for info in answer.known:
            claimed = ownership.known_owners.get(info.shard)
            if info.owner == contact.node_id and claimed is not None and self._is_denied(info.shard, claimed):
                # It claims the term under which the known owner denied: the known owner was wrong.
                store.correct_owner(info.shard, info.term, contact)
            if info.shard in shards and info.term < ownership.fence(info.shard):
                with suppress(ValueError):  # a malformed address
                    below.setdefault(info.contact(), []).append(info.shard)

    async def _request_takeovers(self, orphans: dict[int, Contact | None]) -> None:
        requests: dict[Contact, list[int]] = {}
        for shard, to in orphans.items():
            if to is None and not has_state(self.store, shard):
                # No node that may own it is in reach, and this one has never owned or backed it up. Its owner may start
                # again, with its disk.
                continue
            if to is None or to.node_id == self.swarm.node_id:
                self.rebalance.take_over(shard)
                self.rebalance.wake()
            else:
                requests.setdefault(to, []).append(shard)
        for to, shards in requests.items():
            message = ShardList(shards)
            await self.rpc.try_ask(to, "request_takeover", message, TransferResult)


#: Members asked at once whether they reach another one.
RELAYS_ASKED = 3
#: A take-over waits so long for their answers: they pinged the owner in vain a moment ago, or did not.
SEARCH_WITHIN_S = 0.75


@dataclass(eq=False)
class RouteFinder:
    """Looks for ways to the members that requests of this node depend on."""

    swarm: Swarm
    store: ShardStore
    view: SwarmView
    rpc: ExchangeRpc
    rebalance: RebalanceRequests
    environment: Environment

    def __post_init__(self) -> None:
        self._score = self.view.score

    def due(self) -> list[Contact]:
        """The members to look for now. One that is no member any more, and that nothing depends on, is forgotten."""
        if not (found := self._score.to_look_for()):
            return []
        due, needed = [], self._needed()
        for node, address in found.items():
            if (contact := self.swarm.contact(node)) is not None or node in needed:
                due.append(contact or Contact(node, address))
            else:
                self._score.forget(node)
        return due

    def _needed(self) -> set[bytes]:
        """Owners, and partners of this node's shards."""
        store = self.store
        found = {known.owner.node_id for known in store.ownership.known_owners.values()}
        found |= {to.node_id for owned in store.owned.values() for to in owned.targets()}
        return found | {backed.owner.node_id for backed in store.backed.values()}

    def owners_to_search(self, shards: Iterable[int]) -> list[Contact]:
        """The owners of these shards that this node alone counts as gone: others may reach them. One that the failure
        detector has declared dead was asked by way of others already."""
        known = (self.store.ownership.known_owners.get(shard) for shard in shards)
        owners = {one.owner.node_id: one.owner for one in known if one is not None}
        return [
            owner
            for node, owner in owners.items()
            if self.view.is_gone(node) and not self.swarm.is_gone(node) and not self._score.was_looked_for(node)
        ]

    async def look(self, members: Iterable[Contact], within_s: float | None = None) -> None:
        """Ask these members, and others whether they reach them; None: for as long as such a question may take."""
        await asyncio.gather(*(self._look(contact, within_s) for contact in members))

    async def _look(self, to: Contact, within_s: float | None) -> None:
        relays = self._relays(to.node_id)
        asked = [asyncio.ensure_future(self.rpc.failure(to, way)) for way in (None, *relays)]
        try:
            await asyncio.wait(asked, timeout=within_s)
        finally:
            for question in asked:
                question.cancel()
            direct, *by_relay = await asyncio.gather(*asked, return_exceptions=True)
        if direct is None:
            self._score.answered(to.node_id)
        else:
            found = (one.node_id for one, failure in zip(relays, by_relay, strict=True) if failure is None)
            self._score.failed(to, direct.detail if isinstance(direct, TransportError) else "it does not answer")
            self._score.looked_for(to.node_id, next(found, b""))
        if not self.view.is_gone(to.node_id):
            self.rebalance.wake()

    def _relays(self, node: bytes) -> list[Contact]:
        """Whom to ask: the relay in use, or a few others."""
        if (contact := self.swarm.contact(self._score.relay(node))) is not None:
            return [contact]
        if node not in self._needed():
            return []
        others = [peer.contact for peer in self.view.not_quarantined() if peer.eligible and peer.node_id != node]
        fit = [
            one for one in others if not (self._score.is_unreached(one.node_id) or self.swarm.is_suspect(one.node_id))
        ]
        return self.environment.entropy.random.sample(fit, min(RELAYS_ASKED, len(fit)))
