"""Takes over shards without a living owner, and answers fences. Both begin with a query of the replicas.

A take-over continues from the best reachable copy, which mostly is that of the backup, and never while the owner
answers that it owns the shard, nor while another member reaches the owner. An owner that learns of a term above its own
makes the same query. If that term has an owner, it yields. If another node has a better copy with history, it yields to
that node. Otherwise it raises its term above the fence: a node that remembers the fence would reject this owner as long
as its term is lower.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.peers import Activity, Contact
from p2pnode.overlay.transport import TransportError
from p2pnode.training.cooperative import off_loop
from p2pnode.training.encoding.frames import BadFrame, FrameReader
from p2pnode.training.exchange.delta import NO_VALUES
from p2pnode.training.exchange.directory import SEARCH_WITHIN_S, OwnerDirectory, RouteFinder
from p2pnode.training.exchange.messages import LocateOwners, LocateOwnersAnswer
from p2pnode.training.exchange.ownership_messages import CopyStatus, Fetch, ReplicasAnswer, ShardList, TransferResult
from p2pnode.training.exchange.peer_score import Nonsense
from p2pnode.training.exchange.rpc import ExchangeRpc
from p2pnode.training.exchange.run_state import RebalanceRequests, RunState, SwarmView
from p2pnode.training.exchange.store import shard_states
from p2pnode.training.exchange.store.replica import (
    Replica,
    copy_status,
    has_known_owner,
    has_state,
    rank_copy,
    replica_copy,
)
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import ZERO_TERM, Fence, OwnerInfo, Term
from p2pnode.training.shards.state import ShardState, last_steps
from p2pnode.training.swarm import Swarm

#: A replica is used only when no better copy was found for this long, because a backup may detect the failure this much
#: later. With 5.5 s of detection and a replica query this stays within the detection bound of 10 s.
REPLICA_GRACE_S = 2.5
#: How long after a search that found only replicas the next one starts.
RECHECK_DELAY_S = 0.4
#: How often the other nodes are asked whether they are ready, while a whole swarm restarts.
RESUME_POLL_INTERVAL_S = 0.25
#: Attempts to take every shard while a whole swarm restarts, and to query a node: one may fail during its transfer.
RESUME_ROUNDS = 3

FoundCopies = list[tuple[Contact, CopyStatus]]


@dataclass(eq=False)
class Failover:
    """Take-overs and answers to fences of one node."""

    swarm: Swarm
    store: ShardStore
    replica: Replica
    run: RunState
    view: SwarmView
    rpc: ExchangeRpc
    rebalance: RebalanceRequests
    directory: OwnerDirectory
    routes: RouteFinder
    environment: Environment

    def __post_init__(self) -> None:
        self._clock = self.environment.clock
        self._log = self.environment.log
        self._executor = self.environment.executor
        #: Shards of which only replicas were found: since when, and at which time last.
        self._replica_only: dict[int, tuple[float, float]] = {}
        #: Set while `resume` takes over: replicas may be used at once.
        self._resuming = False
        #: The steps that the nodes which start again had reached, as their disks say. Of the replicas that shards go on
        #: with: the step of the node that had pulled them.
        self._reached: dict[bytes, int] = {}
        self._replica_steps: dict[int, int] = {}
        self.rpc.answer("request_takeover", ShardList, self._on_request_takeover)

    async def _on_request_takeover(self, sender: Contact, message: ShardList) -> TransferResult:
        """Another node finds no owner. This one queries the replicas before it takes over, and asks the known owner
        too."""
        taken = []
        for shard in message.shards:
            # A node that others cannot dial owns nothing that it has no state of: its owner may start again.
            may_take = self.swarm.is_eligible or has_state(self.store, shard)
            if shard < len(self.store) and shard not in self.store.owned and may_take:
                self.rebalance.take_over(shard)
                taken.append(shard)
                known = self.store.ownership.known_owners.get(shard)
                if known is not None and not self.view.is_gone(known.owner.node_id):
                    self.swarm.suspect(known.owner.node_id, f"{sender.node_id.hex()[:8]} cannot reach it")
        self.rebalance.wake()
        return TransferResult(taken, self.store.redirects(message.shards))

    # -- take-over ----------------------------------------------------------------------------------------------

    async def take_over(self, shards: list[int]) -> None:
        """Own shards whose owner is gone: query the candidates, take the best copy, raise the term, announce it."""
        before = {shard: self.store.ownership.fence(shard) for shard in shards}
        # Promise 1 (docs/faults.md): others may reach the owner, which goes on owning then.
        await self.routes.look(self.routes.owners_to_search(shards), SEARCH_WITHIN_S)
        copies = await self._query_replicas(shards)
        taken_over: list[OwnerInfo] = []
        from_replica = 0
        for shard in shards:
            if not self._is_ownerless(shard, copies[shard]):
                continue
            if (best := await self._best_copy(shard, copies[shard])) is None:
                continue
            copied, state = best
            # Promise 7: a broken copy is no model.
            is_in_range = await off_loop(self._executor, state.value.size, state.is_in_range)
            # Promise 1: two owners of a shard would each acknowledge deltas. If meanwhile another node took the shard,
            # or this one became its owner or backup, the replica query is void.
            if shard in self.store.owned or self.store.ownership.fence(shard) != before[shard]:
                continue
            if not is_in_range:
                self._drop_broken(shard, copied)
                continue
            # Promise 6: after a restart of all no delta is on its way.
            if self._resuming and state.unlisted:
                self._era_begins_again(shard, state)
            from_replica += state.era_step > 0
            seen = [item for _, found in copies[shard] for item in (found.term, found.fence)]
            stored = self.store.stored.get(shard)
            is_from_disk = stored is not None and state.value is stored.state.value
            term = self.store.next_term(shard, copied, *seen, begins_generation=self._resuming or is_from_disk)
            now = self._clock.monotonic()
            owned = self.store.own(shard, state, term, self.rpc.me, now, by_handover=False)
            owned.rank_as(copied)
            self.store.fold(shard, self.run.passed_step)
            taken_over.append(OwnerInfo.of(shard, term, self.rpc.me))
        if taken_over:
            self._log.warning("shards_taken_over", count=len(taken_over), from_replica=from_replica)
            await self.announce_owners(taken_over)

    def _drop_broken(self, shard: int, copied: Term) -> None:
        """The best copy is this node's, and its values are broken. The next search takes another one."""
        self._log.error("copy_broken", shard=shard)
        if self.store.unowned_copy(shard) is not None:
            self.store.drop_copy(shard)
        elif self.replica.version_of(shard)[0] == copied:
            self.replica.set_version(shard, ZERO_TERM, 0)  # it counts as never pulled
        self.rebalance.take_over(shard)

    def _era_begins_again(self, shard: int, state: ShardState) -> None:
        """After a restart of all nodes no delta of before is on its way: none of the node with the oldest disk is to
        be refused."""
        self._replica_steps[shard] = state.era_step
        state.era_step = max(1, min([self.run.step, state.era_step, *self._reached.values()]))

    async def resume(self, expected: int, wait_s: float) -> int:
        """Restart a whole swarm: wait for `expected` others, at most `wait_s`, then take all shards without an owner.

        Each continues from the best copy of all nodes. Returns how many other nodes answered. One that has trained on
        and could not own a shard has no copy to wait for.
        """
        # Promise 6: the highest state on any disk that comes in time.
        deadline = self._clock.monotonic() + wait_s
        nothing = ShardList([])
        while True:
            members = self.swarm.members()
            asked = [peer for peer in members if peer.activity is Activity.JOINING or peer.eligible]
            questions = (self.rpc.try_ask(peer.contact, "query_replicas", nothing, ReplicasAnswer) for peer in asked)
            answered = len(members) - (await asyncio.gather(*questions)).count(None)
            if answered >= expected or self._clock.monotonic() >= deadline:
                break
            await asyncio.sleep(RESUME_POLL_INTERVAL_S)
        self._resuming = True
        try:
            for _ in range(RESUME_ROUNDS):
                missing = [shard for shard in range(len(self.store)) if not has_known_owner(self.store, shard)]
                if missing:
                    await self.take_over(missing)
        finally:
            self._resuming = False
        return answered

    def lost_in_restart(self) -> dict[int, int]:
        """After `resume`: of each shard owned now how many steps it lacks of those that the nodes had reached, all
        nodes together. Shards that lack none are left out, and all of a run of named values, which has no steps."""
        if self.store.holds_values:
            return {}
        reached = {**self._reached, self.swarm.node_id: self.run.step}
        found = {}
        for shard, owned in self.store.owned.items():
            last = last_steps(owned.state)
            least = self._replica_steps.get(shard, 0)  # which deltas a replica has is unknown
            found[shard] = sum(max(0, step - max(least, last.get(node, 0))) for node, step in reached.items())
        return {shard: lost for shard, lost in found.items() if lost}

    def _is_ownerless(self, shard: int, found: FoundCopies) -> bool:
        """Whether the owner is dead, has restarted, or answers that it does not own the shard.

        If it does not answer although the failure detector considers it alive, it may still own the shard.
        """
        known, backed = self.store.ownership.known_owners.get(shard), self.store.backed.get(shard)
        if backed is not None and (backed.owner_restarted or self.view.is_gone(backed.owner.node_id)):
            return True
        if known is None or known.owner.node_id == self.swarm.node_id:
            return True
        owner = known.owner.node_id
        answered_copy = next((copy for contact, copy in found if contact.node_id == owner), None)
        # Promise 1: a living owner keeps what it has acknowledged.
        return self.view.is_gone(owner) if answered_copy is None else answered_copy.role != "owner"

    async def announce_owners(self, infos: list[OwnerInfo]) -> None:
        """Announce the owners to the candidates of their shards: the others ask these."""
        found = await self.directory.candidates([info.shard for info in infos])
        told = dict.fromkeys(one for contacts in found for one in contacts if one.node_id != self.swarm.node_id)
        message = LocateOwners([infos[0].shard], infos)
        await asyncio.gather(*(self._tell(contact, message) for contact in told))

    async def _tell(self, to: Contact, message: LocateOwners) -> None:
        answer = await self.rpc.try_ask(to, "where_is", message, LocateOwnersAnswer)
        if answer is not None:
            self.store.note_owners(answer.known)

    async def _query_replicas(self, shards: list[int]) -> dict[int, FoundCopies]:
        """The copies that the candidates of these shards have."""
        asked: dict[bytes, tuple[Contact, dict[int, None]]] = {}
        # When a whole swarm starts again no node may own a shard yet, and any node may have a copy on disk.
        members = [peer.contact for peer in self.swarm.members()] if self._resuming else []
        for shard, candidates in zip(shards, await self.directory.candidates(shards), strict=True):
            known = self.store.ownership.known_owners.get(shard)
            owner = [] if known is None or self.view.is_gone(known.owner.node_id) else [known.owner]
            for contact in [*candidates, *members, *owner]:
                node = contact.node_id
                if node != self.swarm.node_id and not self.view.score.is_quarantined(node):
                    asked.setdefault(node, (contact, {}))[1][shard] = None
        found: dict[int, FoundCopies] = {shard: [] for shard in shards}
        await asyncio.gather(*(self._ask_copies(contact, list(wanted), found) for contact, wanted in asked.values()))
        return found

    async def _ask_copies(self, contact: Contact, wanted: list[int], found: dict[int, FoundCopies]) -> None:
        query, answer, is_not_served = ShardList(wanted), None, False
        # The others have trained on, and have what they pushed.
        peer = self.swarm.peers.get(contact.node_id)
        is_joining = peer is not None and peer.activity is Activity.JOINING
        for _ in range(RESUME_ROUNDS if self._resuming else 1):  # all are busy starting
            try:
                answer = await self.rpc.ask(contact, "query_replicas", query, ReplicasAnswer)
                break
            except TransportError as error:
                is_not_served = error.is_not_served
        if answer is None:
            # One that serves no exchange was started again and loads its model: whatever it owned, it owns no more.
            for shard in wanted if is_not_served else []:
                found[shard].append((contact, CopyStatus(shard, "none", ZERO_TERM, 0, ZERO_TERM, 0)))
            return
        # The answer may name an owner that this node does not know: that one is asked before its shard is taken.
        self.store.note_owners(answer.known)
        is_plausible = self.store.ownership.is_plausible
        for copy in answer.statuses:
            # Promise 7: an absurd term changes nothing.
            if copy.shard in found and is_plausible(copy.term) and is_plausible(copy.fence):
                found[copy.shard].append((contact, copy))
                if self._resuming and is_joining:
                    self._reached[contact.node_id] = min(copy.step, self.view.furthest_step())

    async def _best_copy(self, shard: int, others: FoundCopies) -> tuple[Term, ShardState] | None:
        """The state to continue from and its term; None when the shard has an owner or another node should take it."""
        mine = copy_status(self.store, shard, self.replica.pulled_version(shard), self.run.step)
        for contact, copy in others:
            if copy.role != "owner":
                continue
            if copy.term >= max(mine.term, mine.fence):
                self.store.note_owner(shard, copy.term, contact)
                return None
            if copy.term >= mine.term:
                await self._tell(contact, LocateOwners([shard], [], [Fence(shard, mine.fence)]))
                return None
        pulled = self.replica.pulled_version(shard)
        in_use = {found.term for _, found in others if found.role != "learner"} | ({pulled[0]} if pulled else set())
        me, copies = self.swarm.node_id, [one for one in [*others, (self.rpc.me, mine)] if one[1].role != "none"]
        if not copies:
            return self._empty(shard) if self.store.holds_values else None
        # Of equal copies this node's own, which is here already.
        holder, best = max(copies, key=lambda one: (rank_copy(one[1], in_use), one[0].node_id == me, one[0].node_id))
        if holder.node_id == me:
            found = self.store.unowned_copy(shard)
            if found is None and self._grace_has_passed(shard):
                found = replica_copy(self.store, self.replica, self.run.step, shard)
            return found
        if rank_copy(best, in_use).has_history:
            await self._request_takeover(holder, shard)
            return None
        if not self._grace_has_passed(shard):
            return None
        try:
            return await self._fetch(shard, holder)
        except (TransportError, BadFrame) as error:
            if isinstance(error, Nonsense):
                self.view.score.nonsense(holder.node_id, "state")
            self._log.warning("copy_not_taken", shard=shard, holder=holder.node_id.hex()[:8], reason=str(error))
            return None  # the next tick asks again

    def _empty(self, shard: int) -> tuple[Term, ShardState] | None:
        """A shard of named values whose owner and backup are both gone begins empty. A copy that appears later has the
        whole history, and takes the shard back."""
        if not self._grace_has_passed(shard):
            return None
        if not self._resuming:
            self._log.error("values_lost", shard=shard)
        return ZERO_TERM, self.store.fresh_state(shard, NO_VALUES, era_step=1)

    def _grace_has_passed(self, shard: int) -> bool:
        """Whether a replica may be used now: no node knows which deltas it has, so first give a backup time to appear.

        A leaving node never uses one. Its term would rank above that of a whole state on another node's disk.
        """
        if self.run.is_leaving:
            return False
        if self._resuming:
            return True
        now = self._clock.monotonic()
        since, last = self._replica_only.get(shard, (now, now))
        if now - last > REPLICA_GRACE_S:
            since = now  # an earlier search, which has ended
        self._replica_only[shard] = (since, now)
        # Promise 1: a backup has every delta that was acknowledged.
        if now - since < REPLICA_GRACE_S:
            return False
        del self._replica_only[shard]
        return True

    def waiting(self) -> list[int]:
        """Shards that wait for a backup to appear and are due for another search."""
        now = self._clock.monotonic()
        return [
            shard for shard, (_, last) in self._replica_only.items() if RECHECK_DELAY_S <= now - last <= REPLICA_GRACE_S
        ]

    async def _request_takeover(self, holder: Contact, shard: int) -> None:
        """Ask the holder of the best copy to take over; its own failure detector may need longer."""
        message = ShardList([shard])
        await self.rpc.try_ask(holder, "request_takeover", message, TransferResult)

    async def _fetch(self, shard: int, holder: Contact) -> tuple[Term, ShardState] | None:
        message = Fetch([shard])
        async with self.rpc.request("fetch", holder, message) as answer:
            if self.rpc.decoded(holder, answer.head, ShardList).shards != [shard]:
                return None
            most = self.view.plausible_steps()
            reader, executor = FrameReader(answer.body), self._executor
            term, state = await shard_states.read_state(reader, shard, self.store, most, executor)
            if not self.store.ownership.is_plausible(term):
                raise BadFrame(f"the state of shard {shard} is of term {term.number}")
            return term, state

    # -- fences -------------------------------------------------------------------------------------------------

    async def answer_challenges(self) -> None:
        """Survey the shards owned here of which others have seen a higher term; yield, or raise the term above it."""
        challenges = self.store.outranked()
        copies = await self._query_replicas(list(challenges))
        raised: list[OwnerInfo] = []
        for shard, fence in challenges.items():
            found = copies[shard]
            for contact, copy in found:
                owned = self.store.owned.get(shard)
                if owned is not None and copy.role == "owner" and copy.term > owned.term:
                    self.store.note_owner(shard, copy.term, contact)
            owned = self.store.owned.get(shard)
            # While a hand-over is unanswered it is unknown which node owns the shard: that is resolved first.
            if owned is None or owned.moving or fence <= owned.term:
                continue
            mine = rank_copy(copy_status(self.store, shard, None, self.run.step))
            ranked = [(rank_copy(one), contact) for contact, one in found]
            better = [(rank, contact) for rank, contact in ranked if rank > mine and rank.has_history]
            if better:
                self.store.step_down(shard)
                await self._request_takeover(max(better, key=lambda entry: (entry[0], entry[1].node_id))[1], shard)
                continue
            seen = [one for _, copy in found for one in (copy.term, copy.fence)]
            self.store.drop_backup(shard, self.rpc.me, fence, *seen)
            raised.append(OwnerInfo.of(shard, owned.term, self.rpc.me))
        if raised:
            self._log.warning("owner_rose_above_fence", count=len(raised))
            self.rebalance.wake()
            await self.announce_owners(raised)
