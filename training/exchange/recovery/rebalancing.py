"""Decides which node should own and back up each shard, and starts the jobs that bring it about.

A loop checks all shards twice a second, and at once when membership changes. Slow work runs as separate jobs, so that a
transfer never delays a take-over: moves of shards (`moves`), take-overs and answers to fences (`failover`), and the
duties of other services, each of which says when it is due.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.line.capacity import split
from p2pnode.overlay.peers import Activity, Contact
from p2pnode.overlay.transport import TransportError
from p2pnode.training.encoding.frames import BadFrame
from p2pnode.training.exchange.directory import OwnerDirectory
from p2pnode.training.exchange.owner.publishing import Publisher
from p2pnode.training.exchange.recovery.failover import Failover
from p2pnode.training.exchange.recovery.moves import ShardMoves
from p2pnode.training.exchange.rpc import ExchangeRpc
from p2pnode.training.exchange.run_state import Phase, RebalanceRequests, RunState, SwarmView
from p2pnode.training.exchange.store.records import Owned
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.swarm import Swarm

TICK_S = 0.5
#: Shards ranked without a turn of the loop for others: what is the same for all is found once.
RANKED_AT_ONCE = 8
#: Seconds an owner keeps a shard that it was handed before it hands it to a better placed node.
TENURE_S = 30.0
#: A table of named values is small: it is kept no longer than this, so that a joiner has its share soon.
VALUES_TENURE_S = 2.0
#: How often a leaving node checks whether all its shards have been taken.
LEAVE_POLL_INTERVAL_S = 0.02


class JobKind(StrEnum):
    """What a job does. The values appear in the log."""

    ADD_LEARNER = "teach"
    HAND_OVER = "hand_over"
    TAKE_OVER = "take_over"
    ANSWER_FENCES = "challenge"
    RECONCILE = "repair"
    CONFIRM_BACKUP = "confirm"
    RESEND = "resend"
    FIND_ROUTES = "route"


#: Called when the job starts, so that a job cancelled earlier leaves nothing behind.
Work = Callable[[], Awaitable[None]]


#: What another service does from time to time: what of it is due, if anything, and the work on that.
Duty = tuple[JobKind, Callable[[], Any], Callable[[Any], Awaitable[None]]]


class Jobs:
    """The running jobs of one node."""

    def __init__(self, rebalance: RebalanceRequests, environment: Environment) -> None:
        self._rebalance = rebalance
        self._clock = environment.clock
        self._log = environment.log
        self._tasks: dict[JobKind | bytes, tuple[JobKind, asyncio.Task[None]]] = {}

    def start(self, kind: JobKind, work: Work, target: bytes = b"") -> None:
        """Start a job, unless one for the same target is running, or one of its kind where there is no target."""
        key = target or kind
        if key not in self._tasks:
            task = asyncio.create_task(self._guarded(kind, key, work), name=f"{kind}-{target.hex()[:8]}")
            self._tasks[key] = kind, task

    def is_running(self, kind: JobKind) -> bool:
        """Whether a job of this kind is running, whatever its target."""
        return any(running is kind for running, _ in self._tasks.values())

    async def stop(self) -> None:
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _guarded(self, kind: JobKind, key: JobKind | bytes, work: Work) -> None:
        began = self._clock.monotonic()
        try:
            await work()
        except (TransportError, BadFrame, ValueError) as error:
            self._log.warning("shard_move_failed", kind=kind.value, reason=str(error))
        except Exception as error:
            self._log.error("exchange_service_failed", service=kind.value, error=repr(error))
        finally:
            del self._tasks[key]
            # A job that took no time asked no node: another tick at once would start the same job, without end.
            if self._clock.monotonic() > began:
                self._rebalance.wake()


@dataclass(eq=False)
class Rebalancer:
    """Moves shards so that each has a running owner and, with `replicas = 1`, a running backup."""

    swarm: Swarm
    store: ShardStore
    view: SwarmView
    run_state: RunState
    rpc: ExchangeRpc
    rebalance: RebalanceRequests
    directory: OwnerDirectory
    publisher: Publisher
    moves: ShardMoves
    failover: Failover
    duties: Sequence[Duty]
    settings: ExchangeSettings
    environment: Environment
    #: A benchmark sets another one for all.
    tenure_s = TENURE_S

    def __post_init__(self) -> None:
        self._clock = self.environment.clock
        #: Until this moment, in monotonic seconds, no shard is taken over.
        self._takeover_allowed_at = 0.0
        self._jobs = Jobs(self.rebalance, self.environment)

    async def run(self) -> None:
        """Check all shards until cancelled."""
        try:
            while True:
                await self.rebalance.wait(TICK_S)
                await self.tick()
        finally:
            await self._jobs.stop()

    def delay_takeover(self, seconds: float) -> None:
        """Start no take-over for this long, or until the start has finished: a node that has just begun does not know
        the other nodes yet."""
        self._takeover_allowed_at = self._clock.monotonic() + seconds

    def allow_takeover(self) -> None:
        self._takeover_allowed_at = 0.0
        self.rebalance.wake()

    async def tick(self) -> None:
        """Check all shards once and start the jobs that are due."""
        self._drop_gone_partners()
        self.publisher.drop_unused()
        if orphans := self._orphans():
            self._jobs.start(JobKind.TAKE_OVER, partial(self.failover.take_over, orphans))
        if self.store.outranked():
            self._jobs.start(JobKind.ANSWER_FENCES, self.failover.answer_challenges)
        for kind, due, work in self.duties:
            if found := due():
                self._jobs.start(kind, partial(work, found))
        await self._plan_moves()

    def _orphans(self) -> list[int]:
        """The shards to take over now."""
        asked = {*self.rebalance.collect_orphans(), *self.failover.waiting()}.difference(self.store.owned)
        if self._clock.monotonic() < self._takeover_allowed_at:
            asked = set()
        # A leaving node takes a shard over only to hand it on; without another node its copy stays on its disk.
        if self.run_state.is_leaving and not self.view.has_eligible_others():
            return []
        return sorted(asked.union(self._orphaned_copies()))

    def _orphaned_copies(self) -> list[int]:
        """Shards that this node backs up, and whose owner is gone or has restarted."""
        return [
            shard
            for shard, backed in self.store.backed.items()
            if backed.state is not None and (backed.owner_restarted or self.view.is_gone(backed.owner.node_id))
        ]

    def _drop_gone_partners(self) -> None:
        is_gone = self.view.is_gone
        for shard, owned in list(self.store.owned.items()):
            if owned.learner is not None and is_gone(owned.learner.node_id):
                owned.remove_learner(owned.learner.node_id)
            if owned.backup is None or not is_gone(owned.backup.node_id):
                continue
            if owned.moving:
                # A hand-over was under way. The backup may have become owner and chosen a new backup before it crashed.
                # Become the backup of that dead owner, under the old term: a take-over then queries all
                # copies, and the newer one wins.
                self.store.become_backup(shard, owned.backup, owned.term)
            else:
                # It may only seem dead. A new term makes its copy rank below deltas added from now on.
                self.store.drop_backup(shard, self.rpc.me)

    # -- placement ----------------------------------------------------------------------------------------------

    async def _plan_moves(self) -> None:
        """Start the hand-overs and copies that bring each owned shard to its best candidates, and have the failure
        detector watch the partners."""
        learners: dict[bytes, tuple[Contact, list[int]]] = {}
        handovers: dict[bytes, tuple[Contact, list[int]]] = {}
        async for shard, ranked in self._ranked_candidates():
            owned = self.store.owned.get(shard)
            if owned is None or owned.learner is not None:
                continue
            me, backup = self.swarm.node_id, owned.backup
            others = [one for one in ranked if one.node_id != me and not self.swarm.is_suspect(one.node_id)]
            if not others:
                if backup is not None and not self.swarm.takes_streams(backup.node_id):
                    # Promise 3 (docs/faults.md): no delta reaches it, and nobody else could be the backup.
                    self.store.drop_backup(shard, self.rpc.me)
                continue
            elsewhere = self.run_state.is_leaving or ranked[0].node_id != me
            is_kept = self._is_kept(owned)
            if backup is not None and (
                owned.moving or (elsewhere and not is_kept and self._can_hand_over(backup, others[0], ranked))
            ):
                handovers.setdefault(backup.node_id, (backup, []))[1].append(shard)
            elif self._needs_learner(backup, others[0], is_kept=is_kept, elsewhere=elsewhere):
                learners.setdefault(others[0].node_id, (others[0], []))[1].append(shard)
        for to, shards in handovers.values():
            self._jobs.start(JobKind.HAND_OVER, partial(self.moves.hand_over, to, shards), to.node_id)
        if not self._waits_for_joiners():
            self._start_copies(learners)
        self.swarm.watch(self._partners())

    async def _ranked_candidates(self) -> AsyncIterator[tuple[int, list[Contact]]]:
        """The shards owned here, each with its candidates, best first."""
        shards = list(self.store.owned)
        for first in range(0, len(shards), RANKED_AT_ONCE):
            some = shards[first : first + RANKED_AT_ONCE]
            for shard, ranked in zip(some, await self.directory.candidates(some), strict=True):
                yield shard, ranked
            await asyncio.sleep(0)

    def _is_kept(self, owned: Owned) -> bool:
        """Whether the minimum time as owner is not over. One that others cannot dial any more holds them up."""
        if not owned.by_handover or self.run_state.is_leaving or not self.swarm.is_eligible:
            return False
        most_s = math.inf if owned.state.table is None else VALUES_TENURE_S
        return self._clock.monotonic() - owned.since < min(self.tenure_s, most_s)

    def _can_hand_over(self, backup: Contact, first: Contact, ranked: list[Contact]) -> bool:
        """Whether the shard can be handed over: its backup is the best candidate, or the owner is leaving.

        A backup that is better placed and on a faster line is good enough: it has the state already. It copies the
        state to the best candidate over its own line, not over the slow one.
        """
        if self.run_state.is_leaving or backup.node_id == first.node_id:
            return True
        me = self.swarm.node_id
        if not 0 < split(self.swarm.capacity(me))[0] < split(self.swarm.capacity(backup.node_id))[0]:
            return False
        better = next((one.node_id for one in ranked if one.node_id in (me, backup.node_id)), me)
        return better == backup.node_id and not self.swarm.is_suspect(backup.node_id)

    def _needs_learner(self, backup: Contact | None, first: Contact, *, is_kept: bool, elsewhere: bool) -> bool:
        if backup is None:
            return bool(self.settings.replicas) or (elsewhere and not is_kept)
        return not is_kept and backup.node_id != first.node_id and not self.run_state.is_leaving

    def _waits_for_joiners(self) -> bool:
        """Whether nodes are still being sent the vector, and no delta has come yet.

        Promise 2: over a slow line copies for the first that has it would hold up the others. They cost least as long
        as nothing is added, and protect nothing before.
        """
        if self.rebalance.has_waiting_deltas or any(owned.state.known_count for owned in self.store.owned.values()):
            return False
        return any(peer.activity is Activity.JOINING for peer in self.swarm.members())

    def _start_copies(self, learners: dict[bytes, tuple[Contact, list[int]]]) -> None:
        """Deltas of a shard that has no backup wait until it has a learner: those at once. The others, which only move
        a backup to a better place, one at a time: they share the line with the deltas, and none is missed meanwhile."""
        urgent, others = [], []
        owned = self.store.owned
        for to, planned in learners.values():
            shards = [shard for shard in planned if shard in owned]  # some may have been lost while moves were planned
            if alone := [shard for shard in shards if owned[shard].backup is None]:
                urgent.append((to, alone))
            elif shards:
                others.append((to, shards))
        if not urgent and not self._jobs.is_running(JobKind.ADD_LEARNER):
            urgent = others[:1]
        for to, shards in urgent:
            self._jobs.start(JobKind.ADD_LEARNER, partial(self.moves.copy, to, shards), to.node_id)

    def _partners(self) -> list[bytes]:
        """Nodes whose failure must be detected soon: backups of the shards owned here, owners of those backed here."""
        targets = [contact for owned in self.store.owned.values() for contact in owned.targets()]
        return list(dict.fromkeys(one.node_id for one in [*targets, *(b.owner for b in self.store.backed.values())]))

    async def leave(self, timeout_s: float) -> int:
        """Hand over all owned shards, and first take over those whose owner is gone: of two nodes that leave at one
        moment, each may have handed shards to the other. Returns how many no other node has after `timeout_s`, or when
        no other node is eligible."""
        self.run_state.enter(Phase.LEAVING)
        try:
            async with asyncio.timeout(timeout_s):
                while self._left_behind() and self.view.has_eligible_others():
                    self.rebalance.wake()
                    await asyncio.sleep(LEAVE_POLL_INTERVAL_S)
        except TimeoutError:
            pass
        return self._left_behind()

    def _left_behind(self) -> int:
        """How many shards this node alone has."""
        return len(self.store.owned) + len(self._orphaned_copies())
