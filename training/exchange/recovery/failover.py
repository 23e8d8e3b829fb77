"""Taking over what has no living owner, and rising above a fence: both begin with the question who has what.

A take-over goes on from the best copy that can be reached, and never against a living owner's word. An owner that hears
of a term above its own asks the same question: if that term has an owner it yields to it, if a dead owner's heir has a
better copy it yields to that, and otherwise it rises above, because a bare fence that somebody remembers would shut
that node out for ever.
"""

from __future__ import annotations

import asyncio

from overlay.peers import Contact
from overlay.transport import Response, TransportError
from training.encoding.frames import FrameReader
from training.exchange.context import ExchangeContext
from training.exchange.directory import QUESTION_TIMEOUT_S, OwnerDirectory
from training.exchange.messages import LocateOwners, LocateOwnersAnswer, encode
from training.exchange.ownership_messages import (
    CopyStatus,
    Fetch,
    StateTransfer,
    Survey,
    SurveyAnswer,
    TakeoverRequest,
    TransferResult,
)
from training.exchange.recovery.copy_rank import rank_copy
from training.exchange.store import state_stream
from training.exchange.store.copy_status import copy_status
from training.exchange.store.replica_copies import replica_copy
from training.exchange.terms import Fence, OwnerInfo, Term
from training.shards.state import ShardState

#: Candidates surveyed before a take-over: all of them, the backup may be any.
CANDIDATES_SURVEYED = 20
#: A replica is taken when for this long nobody better was found: others may notice the death this much later. With
#: 5.5 s of detection and a survey it stays within the detection bound of 10 s.
REPLICA_GRACE_S = 2.5
#: Swarms up to this size are told of a new owner node by node; larger ones learn it from answers.
BROADCAST_MAX_PEERS = 20
RECHECK_DELAY_S = 0.4
#: While a swarm that was switched off comes together, how often the others are asked whether they are ready.
RESUME_POLL_INTERVAL_S = 0.25
#: A holder that dies while its state is fetched leaves the shard to the next best; one that does not answer is asked
#: again.
RESUME_ROUNDS = 3

FoundCopies = list[tuple[Contact, CopyStatus]]


class Failover:
    """Take-overs, and the answers to fences."""

    def __init__(self, context: ExchangeContext, directory: OwnerDirectory) -> None:
        self._context = context
        self._swarm = context.swarm
        self._store = context.store
        self._replica = context.replica
        self._run = context.run
        self._view = context.view
        self._rpc = context.rpc
        self._rebalance = context.rebalance
        self._clock = context.environment.clock
        self._log = context.environment.log
        self._directory = directory
        #: Shards of which only replicas were found: since when, and when last.
        self._replica_only: dict[int, tuple[float, float]] = {}
        #: Whether `resume` has looked around for as long as it should: replicas may be taken at once.
        self._resuming = False
        self._rpc.register("appeal", TakeoverRequest, self._on_appeal)

    async def _on_appeal(self, sender: Contact, message: TakeoverRequest, _stream: object) -> Response:
        """Somebody finds no owner. Nothing is believed here: the survey of a take-over asks the believed one too."""
        taken = []
        for shard in message.shards:
            if shard < len(self._store) and shard not in self._store.owned:
                self._rebalance.take_over(shard)
                taken.append(shard)
                belief = self._store.ownership.known_owners.get(shard)
                if belief is not None and not self._view.is_gone(belief.owner.node_id):
                    self._swarm.suspect(belief.owner.node_id, f"{sender.node_id.hex()[:8]} cannot reach it")
        self._rebalance.wake()
        others = [where for shard in message.shards if (where := self._store.ownership.owner_info(shard)) is not None]
        return Response(encode(TransferResult(taken, others)))

    # -- take-over ----------------------------------------------------------------------------------------------

    async def take_over(self, shards: list[int]) -> None:
        """Own shards whose owner is gone: ask the candidates what they have, take the best, raise the term, tell."""
        before = {shard: self._store.ownership.fence(shard) for shard in shards}
        standings = await self._survey(shards)
        told: list[OwnerInfo] = []
        from_replica = 0
        for shard in shards:
            if not self._is_ownerless(shard, standings[shard]):
                continue
            best = await self._best_copy(shard, standings[shard])
            # Meanwhile somebody else may have taken it, or taught this node: the survey is of no worth then.
            if best is None or shard in self._store.owned or self._store.ownership.fence(shard) != before[shard]:
                continue
            copied, state = best
            from_replica += state.era_step > 0
            seen = [item for _, found in standings[shard] for item in (found.term, found.fence)]
            term = self._store.next_term(shard, *seen)
            now = self._clock.monotonic()
            owned = self._store.own(shard, state, term, self._context.me(), now, has_tenure=False)
            owned.first_copy = copied, state.known_count
            if self._context.synchronous:
                self._store.fold(shard, self._run.passed_step)
            elif state.pending:
                self._store.close_complete(shard, self._view.worker_count())
            told.append(OwnerInfo.of(shard, term, self._context.me()))
        if told:
            self._log.warning("shards_taken_over", count=len(told), from_replica=from_replica)
            await self.announce_owners(told)

    async def resume(self, expected: int, wait_s: float) -> int:
        """A swarm that was switched off: wait for so many others, at most so long; then take every shard that has no
        owner, from the best that anybody has. Returns how many others could be asked."""
        deadline = self._clock.monotonic() + wait_s
        while True:
            contacts = [peer.contact for peer in self._swarm.members()]
            answered = sum(await asyncio.gather(*(self._is_ready(contact) for contact in contacts)))
            if answered >= expected or self._clock.monotonic() >= deadline:
                break
            await asyncio.sleep(RESUME_POLL_INTERVAL_S)
        self._resuming = True
        try:
            for _ in range(RESUME_ROUNDS):
                missing = [shard for shard in range(len(self._store)) if self._unowned(shard)]
                if missing:
                    await self.take_over(missing)
        finally:
            self._resuming = False
        return answered

    def _unowned(self, shard: int) -> bool:
        return shard not in self._store.owned and shard not in self._store.ownership.known_owners

    async def _is_ready(self, contact: Contact) -> bool:
        """Whether a node's exchange answers."""
        try:
            await self._rpc.ask(contact, "survey", Survey(self._context.genesis, []), SurveyAnswer, QUESTION_TIMEOUT_S)
        except TransportError:
            return False
        return True

    def _is_ownerless(self, shard: int, found: FoundCopies) -> bool:
        """Dead, started anew, or it says itself that it does not own the shard. Silence of one that liveness holds for
        alive proves nothing yet."""
        belief, backed = self._store.ownership.known_owners.get(shard), self._store.backed.get(shard)
        if backed is not None and (backed.owner_restarted or self._view.is_gone(backed.owner.node_id)):
            return True
        if belief is None or belief.owner.node_id == self._swarm.node_id:
            return True
        owner = belief.owner.node_id
        said = next((standing for contact, standing in found if contact.node_id == owner), None)
        return self._view.is_gone(owner) if said is None else said.role != "owner"

    async def announce_owners(self, wheres: list[OwnerInfo]) -> None:
        """Tell the members of a small swarm, or the shards' candidates, who owns them now."""
        members = self._swarm.members()
        listeners = {peer.node_id: peer.contact for peer in members} if len(members) <= BROADCAST_MAX_PEERS else {}
        for where in wheres if not listeners else ():
            listeners.update({contact.node_id: contact for contact in await self._directory.candidates(where.shard)})
        listeners.pop(self._swarm.node_id, None)
        await asyncio.gather(*(self._tell(contact, wheres) for contact in listeners.values()))

    async def _survey(self, shards: list[int]) -> dict[int, FoundCopies]:
        asked: dict[bytes, tuple[Contact, list[int]]] = {}
        for shard in shards:
            contacts = (await self._directory.candidates(shard))[:CANDIDATES_SURVEYED]
            if self._resuming:
                # Nobody may own yet, and whoever has been started again may have something.
                contacts += [peer.contact for peer in self._swarm.members()]
            belief = self._store.ownership.known_owners.get(shard)
            if belief is not None and not self._view.is_gone(belief.owner.node_id):
                contacts.append(belief.owner)
            for contact in contacts:
                theirs = asked.setdefault(contact.node_id, (contact, []))[1]
                if contact.node_id != self._swarm.node_id and shard not in theirs:
                    theirs.append(shard)
        found: dict[int, FoundCopies] = {shard: [] for shard in shards}

        async def ask(contact: Contact, theirs: list[int], tries: int) -> None:
            try:
                survey = Survey(self._context.genesis, theirs)
                answer = await self._rpc.ask(contact, "survey", survey, SurveyAnswer, QUESTION_TIMEOUT_S)
            except TransportError:
                if tries > 1:
                    await ask(contact, theirs, tries - 1)
                    return
                self._view.note_failure(contact.node_id)
                return
            # Somebody may know an owner that this node has not met: it is asked before anything is taken from it.
            self._store.note_owners(answer.known)
            for standing in answer.statuses:
                if standing.shard in found:
                    found[standing.shard].append((contact, standing))

        # After a whole swarm was switched off anybody's state may be the highest, and the machines are busy starting.
        tries = RESUME_ROUNDS if self._resuming else 1
        await asyncio.gather(*(ask(contact, theirs, tries) for contact, theirs in asked.values() if theirs))
        return found

    async def _best_copy(self, shard: int, others: FoundCopies) -> tuple[Term, ShardState] | None:
        """The state to go on from and the term it had, or None when the shard has an owner or is another's to take."""
        mine = copy_status(self._store, shard, self._replica.pulled_version(shard), self._run.step)
        for contact, standing in others:
            if standing.role != "owner":
                continue
            if standing.term >= max(mine.term, mine.fence):
                self._store.note_owner(shard, standing.term, contact)
                return None
            if standing.term >= mine.term:
                await self._send_fence(contact, shard)
                return None
        spoken = {found.term: None for _, found in others if found.role != "learner"}
        if (pulled := self._replica.pulled_version(shard)) is not None:
            spoken[pulled[0]] = None
        ranked = sorted(
            ((rank_copy(found, spoken), contact) for contact, found in others if found.role != "none"),
            key=lambda entry: (entry[0], entry[1].node_id),
        )
        own_rank = rank_copy(mine, spoken)
        if mine.role == "none" and not ranked:
            return None
        if not ranked or (mine.role != "none" and own_rank >= ranked[-1][0]):
            found = self._store.unowned_copy(shard)
            if found is None and self._grace_has_passed(shard):
                found = replica_copy(self._store, self._replica, self._run.step, shard)
            return found
        best, holder = ranked[-1]
        if best.has_history:
            await self._request_takeover(holder, shard)
            return None
        if not self._grace_has_passed(shard):
            return None
        try:
            return await self._fetch(shard, holder)
        except TransportError:
            return None  # the next look asks anew

    def _grace_has_passed(self, shard: int) -> bool:
        """A replica is the last resort: nobody knows which deltas it has. First wait for a backup to come forward; and
        who leaves takes none, for it would go with it, under a higher term than the whole state on another's disk."""
        if self._run.is_leaving:
            return False
        if self._resuming:
            return True
        now = self._clock.monotonic()
        since, last = self._replica_only.get(shard, (now, now))
        if now - last > REPLICA_GRACE_S:
            since = now  # another time
        self._replica_only[shard] = (since, now)
        if now - since < REPLICA_GRACE_S:
            return False
        del self._replica_only[shard]
        return True

    def waiting(self) -> list[int]:
        """Shards that wait for a backup to come forward, and are due to be looked at again."""
        now = self._clock.monotonic()
        return [
            shard for shard, (_, last) in self._replica_only.items() if RECHECK_DELAY_S <= now - last <= REPLICA_GRACE_S
        ]

    async def _request_takeover(self, holder: Contact, shard: int) -> None:
        """A living node has the best copy: its own liveness will tell it, sooner when we do."""
        try:
            await self._rpc.ask(
                holder, "appeal", TakeoverRequest(self._context.genesis, [shard]), TransferResult, QUESTION_TIMEOUT_S
            )
        except TransportError:
            return

    async def _send_fence(self, owner: Contact, shard: int) -> None:
        fence = Fence(shard, *self._store.ownership.fence(shard))
        question = LocateOwners(self._context.genesis, [shard], [], [fence])
        try:
            await self._rpc.ask(owner, "where_is", question, LocateOwnersAnswer, QUESTION_TIMEOUT_S)
        except TransportError:
            return

    async def _fetch(self, shard: int, holder: Contact) -> tuple[Term, ShardState] | None:
        message = Fetch(self._context.genesis, [shard])
        async with self._rpc.request("fetch", holder, message) as answer:
            heads = self._rpc.decoded(holder, answer.head, StateTransfer).states
            if len(heads) != 1 or heads[0].shard != shard:
                return None
            return heads[0].term, await state_stream.read_state(FrameReader(answer.body), heads[0], self._store)

    async def _tell(self, to: Contact, wheres: list[OwnerInfo]) -> None:
        try:
            message = LocateOwners(self._context.genesis, [wheres[0].shard], wheres)
            answer = await self._rpc.ask(to, "where_is", message, LocateOwnersAnswer, QUESTION_TIMEOUT_S)
        except TransportError:
            return  # it will learn from a redirect
        self._store.note_owners(answer.known)

    # -- fences -------------------------------------------------------------------------------------------------

    async def answer_challenges(self) -> None:
        """Owners of ours that met a higher term: whose is it?"""
        challenges = self._rebalance.collect_challenges()
        standings = await self._survey(list(challenges))
        risen: list[OwnerInfo] = []
        for shard, fence in challenges.items():
            found = standings[shard]
            for contact, standing in found:
                owned = self._store.owned.get(shard)
                if owned is not None and standing.role == "owner" and standing.term > owned.term:
                    self._store.note_owner(shard, standing.term, contact)
            owned = self._store.owned.get(shard)
            # While a hand-over has no answer nobody knows whose the shard is: that is found out first.
            if owned is None or owned.moving or fence <= owned.term:
                continue
            mine = rank_copy(copy_status(self._store, shard, None, self._run.step))
            ranked = [(rank_copy(one), contact) for contact, one in found]
            better = [(rank, contact) for rank, contact in ranked if rank > mine and rank.has_history]
            if better:
                self._store.step_down(shard)
                await self._request_takeover(max(better, key=lambda entry: (entry[0], entry[1].node_id))[1], shard)
                continue
            seen = [one for _, standing in found for one in (standing.term, standing.fence)]
            self._store.drop_backup(shard, self._context.me(), fence, *seen)
            risen.append(OwnerInfo.of(shard, owned.term, self._context.me()))
        if risen:
            self._log.warning("owner_rose_above_fence", count=len(risen))
            self._rebalance.wake()
            await self.announce_owners(risen)
