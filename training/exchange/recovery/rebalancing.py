"""Decides which node should own and back up each shard, and starts the jobs that bring it about.

A loop checks all shards twice a second, and at once when membership changes. Slow work runs as separate jobs, so that a
transfer never delays a take-over:

* `handover`: a new backup catches up; a backup becomes the owner.
* `failover`: shards without an owner are taken over, and fences are answered.
* `reconciliation`: diverged copies are reconciled.
* `training.exchange.backup`: silent owners are asked whether they still use this backup.
* `resending`: what an owner had acknowledged and lost is sent again.
* `route_finder`: owners and backups that do not answer are asked by way of other members.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

from overlay.capacity import split
from overlay.peers import Activity, Contact
from training.cooperative import VALUES_PER_TURN, LoopYielder
from training.exchange.backup import BackupConfirmation
from training.exchange.context import ExchangeContext
from training.exchange.directory import OwnerDirectory
from training.exchange.jobs import JobKind, Jobs
from training.exchange.owner.deltas import DeltaHandler
from training.exchange.owner.publishing import Publisher
from training.exchange.recovery.failover import Failover
from training.exchange.recovery.handover import Learners, ShardHandover
from training.exchange.recovery.reconciliation import SplitReconciler
from training.exchange.recovery.resending import Resending
from training.exchange.recovery.route_finder import RouteFinder
from training.exchange.run_state import Phase
from training.exchange.store.records import Owned

TICK_S = 0.5
#: To rank the candidates of a shard after a change of membership takes as long as so many values to be added.
VALUES_PER_RANKING = VALUES_PER_TURN // 2
#: Shards ranked without a turn of the loop for others: what is the same for all is found once.
RANKED_AT_ONCE = 8
#: A table of named values is kept for so long, and so many times as long as it takes to be moved.
VALUES_TENURE_S, TENURE_MOVES = 1.0, 4.0
#: Of a line that was not measured yet.
UNMEASURED_BYTES_PER_S = 16.0 * (1 << 20)
#: How often a leaving node checks whether all its shards have been taken.
LEAVE_POLL_INTERVAL_S = 0.02


class Rebalancer:
    """Moves shards so that each has a running owner and, with `replicas = 1`, a running backup."""

    def __init__(
        self,
        context: ExchangeContext,
        directory: OwnerDirectory,
        deltas: DeltaHandler,
        reconciler: SplitReconciler,
        publisher: Publisher,
        resending: Resending,
    ) -> None:
        self._context = context
        self._swarm = context.swarm
        self._store = context.store
        self._run = context.run
        self._view = context.view
        self._rebalance = context.rebalance
        self._clock = context.environment.clock
        self._log = context.environment.log
        self._directory = directory
        self._deltas = deltas
        self._reconciler = reconciler
        self._publisher = publisher
        self._routes = RouteFinder(
            swarm=context.swarm,
            store=context.store,
            view=context.view,
            rpc=context.rpc,
            rebalance=context.rebalance,
            environment=context.environment,
        )
        self._failover = Failover(
            swarm=context.swarm,
            store=context.store,
            replica=context.replica,
            run=context.run,
            view=context.view,
            rpc=context.rpc,
            rebalance=context.rebalance,
            directory=directory,
            routes=self._routes,
            environment=context.environment,
            is_synchronous=context.synchronous,
        )
        self._confirmation = BackupConfirmation(context)
        self._resending = resending
        #: Until this moment, in monotonic seconds, no shard is taken over.
        self._takeover_allowed_at = 0.0
        self._jobs = Jobs(context.rebalance, context.environment)
        self._learners = Learners(context, self._jobs, publisher)
        self._handover = ShardHandover(context, deltas, publisher)

    async def run(self) -> None:
        """Check all shards until cancelled."""
        try:
            while True:
                await self._rebalance.wait(TICK_S)
                await self.tick()
        finally:
            await self._jobs.stop()

    def delay_takeover(self, seconds: float) -> None:
        """Start no take-over for this long: a node that has just started does not know the other nodes yet."""
        self._takeover_allowed_at = self._clock.monotonic() + seconds

    def allow_takeover(self) -> None:
        self._takeover_allowed_at = 0.0
        self._rebalance.wake()

    async def tick(self) -> None:
        """Check all shards once and start the jobs that are due."""
        self._jobs.forget_done()
        self._rebalance.challenge_own()
        if unreached := self._routes.due():
            self._jobs.start(JobKind.FIND_ROUTES, b"", partial(self._routes.look, unreached))
        self._drop_gone_partners()
        self._publisher.drop_unused()
        asked = [*self._rebalance.collect_orphans(), *self._failover.waiting()]
        orphans = [shard for shard in asked if shard not in self._store.owned]
        if self._clock.monotonic() < self._takeover_allowed_at:
            orphans = []
        if silent := self._confirmation.due():
            self._jobs.start(JobKind.CONFIRM_BACKUP, b"", partial(self._confirmation.ask, silent))
        if not self._jobs.is_running(JobKind.RESEND) and (moved := self._resending.due()):
            self._jobs.start(JobKind.RESEND, b"", partial(self._resending.send, moved))
        lost_owner = self._orphaned_copies()
        # A leaving node takes a shard over only to hand it on; without another node its copy stays on its disk.
        if (orphans or lost_owner) and not (self._run.is_leaving and not self._view.has_eligible_others()):
            self._jobs.start(JobKind.TAKE_OVER, b"", partial(self._failover.take_over, sorted({*orphans, *lost_owner})))
        if self._rebalance.has_challenges:
            self._jobs.start(JobKind.ANSWER_FENCES, b"", self._failover.answer_challenges)
        if self._reconciler.due():
            self._jobs.start(JobKind.RECONCILE, b"", self._reconciler.reconcile)
        await self._plan_moves()

    async def resume(self, expected: int, wait_s: float) -> int:
        """See `Failover.resume`."""
        return await self._failover.resume(expected, wait_s)

    def lost_in_restart(self) -> dict[int, int]:
        """See `Failover.lost_in_restart`."""
        return self._failover.lost_in_restart()

    def _orphaned_copies(self) -> list[int]:
        """Shards that this node backs up, and whose owner is gone or has restarted."""
        return [
            shard
            for shard, backed in self._store.backed.items()
            if backed.state is not None and (backed.owner_restarted or self._view.is_gone(backed.owner.node_id))
        ]

    def _drop_gone_partners(self) -> None:
        is_gone = self._view.is_gone
        for shard, owned in list(self._store.owned.items()):
            if owned.backup is not None and is_gone(owned.backup.node_id):
                if owned.moving:
                    # A hand-over was under way. The backup may have become owner and chosen a new backup before it
                    # crashed. Become the backup of that dead owner, under the old term: a take-over then surveys all
                    # copies, and the newer one wins.
                    self._store.become_backup(shard, owned.backup, owned.term)
                    continue
                # It may only seem dead. A new term makes its copy rank below deltas added from now on.
                self._store.drop_backup(shard, self._context.me())
            if owned.learner is not None and is_gone(owned.learner.node_id):
                owned.remove_learner(owned.learner.node_id)

    # -- placement ----------------------------------------------------------------------------------------------

    async def _plan_moves(self) -> None:
        """Start the hand-overs and catch-ups that bring each owned shard to its best candidates, and have the failure
        detector watch the partners."""
        now = self._clock.monotonic()
        me = self._swarm.node_id
        learners: dict[bytes, tuple[Contact, list[int]]] = {}
        handovers: dict[bytes, tuple[Contact, list[int]]] = {}
        async for shard, ranked in self._ranked_candidates():
            owned = self._store.owned.get(shard)
            if owned is None or owned.learner is not None:
                continue
            others = [
                contact for contact in ranked if contact.node_id != me and not self._swarm.is_suspect(contact.node_id)
            ]
            if not others:
                if owned.backup is not None and not self._swarm.takes_streams(owned.backup.node_id):
                    # It lives, and no delta reaches it. Nobody else could be the backup: the others need not wait.
                    self._store.drop_backup(shard, self._context.me())
                continue
            minimum_time_over = not owned.by_handover or now - owned.since >= self._tenure_s(owned)
            # One that others cannot dial any more holds them up.
            tenure_over = minimum_time_over or self._run.is_leaving or not self._swarm.is_eligible
            elsewhere = self._run.is_leaving or ranked[0].node_id != me
            if owned.moving or (elsewhere and tenure_over and self._can_hand_over(owned, others[0], ranked)):
                if owned.backup is not None:
                    handovers.setdefault(owned.backup.node_id, (owned.backup, []))[1].append(shard)
            elif self._needs_learner(owned, others[0], tenure_over=tenure_over, elsewhere=elsewhere):
                learners.setdefault(others[0].node_id, (others[0], []))[1].append(shard)
        for contact, shards in handovers.values():
            self._jobs.start(JobKind.HAND_OVER, contact.node_id, partial(self._handover.hand_over, contact, shards))
        if not self._waits_for_joiners():
            self._start_copies(learners)
        self._swarm.watch(self._partners())

    async def _ranked_candidates(self) -> AsyncIterator[tuple[int, list[Contact]]]:
        """The shards owned here, each with its candidates, best first."""
        turn, shards = LoopYielder(), list(self._store.owned)
        for first in range(0, len(shards), RANKED_AT_ONCE):
            some = shards[first : first + RANKED_AT_ONCE]
            await turn.after(len(some) * VALUES_PER_RANKING)
            for shard, ranked in zip(some, await self._directory.candidates_of_all(some), strict=True):
                yield shard, ranked

    def _tenure_s(self, owned: Owned) -> float:
        """How long this node keeps a shard at least. A table of named values is small: it is kept for some times as
        long as its move takes, so that moves take a bounded share of the line, and a joiner has its share soon."""
        longest_s, table = self._context.settings.tenure_s, owned.state.table
        if table is None:
            return longest_s
        rate = self._swarm.line.upload.bytes_per_s or UNMEASURED_BYTES_PER_S
        return min(longest_s, VALUES_TENURE_S + TENURE_MOVES * table.size_bytes / rate)

    def _waits_for_joiners(self) -> bool:
        """Whether nodes are still being sent the vector, and no delta has come yet.

        Over a slow line copies for the first that has it would hold up the others, and the best places are not known
        before all are there. They cost least as long as nothing is added, and protect nothing before.
        """
        if self._rebalance.has_waiting_deltas or any(owned.state.known_count for owned in self._store.owned.values()):
            return False
        return any(peer.activity is Activity.JOINING for peer in self._swarm.members())

    def _start_copies(self, learners: dict[bytes, tuple[Contact, list[int]]]) -> None:
        """Deltas of a shard that has no backup wait until it has a learner: those at once. The others, which only move
        a backup to a better place, one at a time: they share the line with the deltas, and none is missed meanwhile."""
        urgent, others = [], []
        owned = self._store.owned
        for contact, planned in learners.values():
            shards = [shard for shard in planned if shard in owned]  # some may have been lost while moves were planned
            alone = [shard for shard in shards if owned[shard].backup is None]
            if alone:
                urgent.append((contact, alone))
            elif shards:
                others.append((contact, self._learners.batch(shards)))
        if not urgent and not self._jobs.is_running(JobKind.ADD_LEARNER):
            urgent = others[:1]
        for contact, shards in urgent:
            self._jobs.start(JobKind.ADD_LEARNER, contact.node_id, partial(self._learners.add_learner, contact, shards))

    def _can_hand_over(self, owned: Owned, first: Contact, ranked: list[Contact]) -> bool:
        """Whether the shard can be handed over: its backup is the best candidate, or the owner is leaving.

        A backup that is better placed and on a faster line is good enough: it has the state already. It copies the
        state to the best candidate over its own line, not over the slow one.
        """
        if owned.backup is None:
            return False
        if self._run.is_leaving or owned.backup.node_id == first.node_id:
            return True
        me, backup = self._swarm.node_id, owned.backup.node_id
        if not 0 < split(self._swarm.capacity(me))[0] < split(self._swarm.capacity(backup))[0]:
            return False
        better = next((contact.node_id for contact in ranked if contact.node_id in (me, backup)), me)
        return better == backup and not self._swarm.is_suspect(backup)

    def _needs_learner(self, owned: Owned, first: Contact, *, tenure_over: bool, elsewhere: bool) -> bool:
        if owned.backup is None:
            return bool(self._context.settings.replicas) or (elsewhere and tenure_over)
        return tenure_over and owned.backup.node_id != first.node_id and not self._run.is_leaving

    def _partners(self) -> list[bytes]:
        """Nodes whose failure must be detected soon: backups of the shards owned here, owners of those backed here."""
        partners: dict[bytes, None] = {}
        for owned in self._store.owned.values():
            for contact in owned.targets():
                partners[contact.node_id] = None
        for backed in self._store.backed.values():
            partners[backed.owner.node_id] = None
        return list(partners)

    async def leave(self, timeout_s: float) -> int:
        """Hand over all owned shards, and first take over those whose owner is gone: of two nodes that leave at one
        moment, each may have handed shards to the other. Returns how many no other node has after `timeout_s`, or when
        no other node is eligible."""
        self._run.enter(Phase.LEAVING)
        try:
            async with asyncio.timeout(timeout_s):
                while self._left_behind() and self._view.has_eligible_others():
                    self._rebalance.wake()
                    await asyncio.sleep(LEAVE_POLL_INTERVAL_S)
        except TimeoutError:
            pass
        return self._left_behind()

    def _left_behind(self) -> int:
        """How many shards this node alone has."""
        return len(self._store.owned) + len(self._orphaned_copies())
