"""Keeping every shard owned and backed up: learners become backups, joins and leaves hand over, deaths are taken over.

A loop looks at all shards twice a second, and at once when membership changes; whatever takes time runs as a job of its
own, so that a slow transfer never delays a take-over. Never stop to copy: a new backup first takes the live deltas, the
state streams beside them, and the switch is one round trip.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from overlay.peers import Contact
from overlay.transport import TransportError
from training.encoding.frames import BadFrame
from training.exchange.backup.confirmation import BackupConfirmation
from training.exchange.context import ExchangeContext
from training.exchange.cooperative import LoopYielder
from training.exchange.directory import QUESTION_TIMEOUT_S, OwnerDirectory
from training.exchange.messages import HandOver, Learn, Release, StateHead, StateTransfer, TransferResult
from training.exchange.owner.deltas import DeltaHandler
from training.exchange.recovery.failover import Failover
from training.exchange.recovery.reconciliation import SplitReconciler
from training.exchange.run_state import Phase
from training.exchange.store import state_stream
from training.exchange.store.records import Owned
from training.exchange.store.state_head import describe
from training.exchange.terms import OwnerInfo, Term
from training.shards.state import ShardState

#: A job: called when it starts, so that one cancelled before leaves nothing behind.
Work = Callable[[], Awaitable[None]]

TICK_S = 0.5
#: States of at most this many bytes are snapshotted and sent in one request.
BATCH_BYTES = 64 * 1024 * 1024
#: A hand-over waits this long for the deltas in flight, then gives up for this time.
DRAIN_S = 1.0
#: While leaving, how often to look whether everything has been taken.
RECHECK_S = 0.02


class Rebalancer:
    """Moves shards so that each has a living owner and, with `replicas = 1`, a living backup."""

    def __init__(
        self, context: ExchangeContext, finding: OwnerDirectory, serving: DeltaHandler, mending: SplitReconciler
    ) -> None:
        self._context = context
        self._swarm = context.swarm
        self._store = context.store
        self._run = context.run
        self._view = context.view
        self._rpc = context.rpc
        self._rebalance = context.rebalance
        self._clock = context.environment.clock
        self._log = context.environment.log
        self._finding = finding
        self._serving = serving
        self._mending = mending
        self._taking = Failover(context, finding)
        self._confirming = BackupConfirmation(context)
        #: Until this moment, in monotonic seconds, no shard is taken over.
        self._takeover_allowed_at = 0.0
        self._jobs: dict[tuple[str, bytes], asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Look at all shards until cancelled."""
        try:
            while True:
                await self._rebalance.wait(TICK_S)
                await self.tend()
        finally:
            jobs = list(self._jobs.values())
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    def hold_back(self, seconds: float) -> None:
        """Take no shard over for so long: a node that has just started learns first which others there are."""
        self._takeover_allowed_at = self._clock.monotonic() + seconds

    def allow_takeover(self) -> None:
        self._takeover_allowed_at = 0.0
        self._rebalance.wake()

    async def tend(self) -> None:
        """One look: start whatever should be under way."""
        self._jobs = {key: job for key, job in self._jobs.items() if not job.done()}
        self._drop_dead_partners()
        self._serving.close_windows()
        asked = [*self._rebalance.collect_orphans(), *self._taking.waiting()]
        orphans = [shard for shard in asked if shard not in self._store.owned]
        if self._clock.monotonic() < self._takeover_allowed_at:
            orphans = []
        if silent := self._confirming.due():
            self._start("confirm", b"", partial(self._confirming.ask, silent))
        bereft = [
            shard
            for shard, backed in self._store.backed.items()
            if backed.state is not None and (backed.bereft or self._view.is_gone(backed.owner.node_id))
        ]
        # Who leaves takes a shard only to hand it on: its copy is on its disk under the term that it is worth.
        if (orphans or bereft) and not (self._run.is_leaving and not self._view.has_eligible_others()):
            self._start("take_over", b"", partial(self._taking.take_over, sorted({*orphans, *bereft})))
        if self._rebalance.has_challenges:
            self._start("challenge", b"", self._taking.answer_challenges)
        if self._mending.due():
            self._start("mend", b"", self._mending.mend)
        await self._arrange()

    async def resume(self, expected: int, wait_s: float) -> int:
        """`Failover.resume`."""
        return await self._taking.resume(expected, wait_s)

    def _start(self, kind: str, target: bytes, work: Work) -> None:
        if (kind, target) in self._jobs or self._moving_to(target):
            return
        task = asyncio.create_task(self._guarded(kind, work), name=f"{kind}-{target.hex()[:8]}")
        self._jobs[kind, target] = task

    def _moving_to(self, target: bytes) -> bool:
        return bool(target) and any(node == target for _, node in self._jobs)

    async def _guarded(self, kind: str, work: Work) -> None:
        began = self._clock.monotonic()
        try:
            await work()
        except (TransportError, BadFrame, ValueError) as error:
            self._log.warning("shard_move_failed", kind=kind, reason=str(error))
        finally:
            # What took no time had nobody to ask: looking again at once would find the same, for ever.
            if self._clock.monotonic() > began:
                self._rebalance.wake()

    def _drop_dead_partners(self) -> None:
        gone = self._view.is_gone
        for shard, owned in list(self._store.owned.items()):
            if owned.backup is not None and gone(owned.backup.node_id):
                if owned.moving:
                    # Nobody knows whether it took the shard before it died, and perhaps taught a third node: take it
                    # for the dead owner that it may have been, and ask around like any backup. Under our own old
                    # term, for then that third node's copy is the better one.
                    self._store.demote(shard, owned.backup, owned.term)
                    continue
                # Perhaps it is not dead: then what it has must rank below what comes from now on.
                self._store.drop_backup(shard, self._context.me())
            if owned.learner is not None and gone(owned.learner.node_id):
                owned.learner = None

    # -- who should have what -----------------------------------------------------------------------------------

    async def _arrange(self) -> None:
        now = self._clock.monotonic()
        me = self._swarm.node_id
        teach: dict[bytes, tuple[Contact, list[int]]] = {}
        hand: dict[bytes, tuple[Contact, list[int]]] = {}
        for shard in list(self._store.owned):
            ranked = await self._finding.candidates(shard)
            owned = self._store.owned.get(shard)
            if owned is None or owned.learner is not None:
                continue
            others = [
                contact for contact in ranked if contact.node_id != me and not self._swarm.is_suspect(contact.node_id)
            ]
            if not others:
                continue
            settled = self._run.is_leaving or not owned.tenured or now - owned.since >= self._context.settings.tenure_s
            elsewhere = self._run.is_leaving or ranked[0].node_id != me
            if owned.moving or (elsewhere and settled and self._has(owned, others[0])):
                if owned.backup is not None:
                    hand.setdefault(owned.backup.node_id, (owned.backup, []))[1].append(shard)
            elif self._wants_teaching(owned, others[0], settled=settled, elsewhere=elsewhere):
                teach.setdefault(others[0].node_id, (others[0], []))[1].append(shard)
        for contact, shards in hand.values():
            self._start("hand_over", contact.node_id, partial(self._hand_over, contact, shards))
        for contact, shards in teach.values():
            self._start("teach", contact.node_id, partial(self._teach, contact, shards))
        self._swarm.watch(self._partners())

    def _has(self, owned: Owned, first: Contact) -> bool:
        """Whether the node that should own it has everything; a leaving owner takes any backup."""
        if owned.backup is None:
            return False
        return self._run.is_leaving or owned.backup.node_id == first.node_id

    def _wants_teaching(self, owned: Owned, first: Contact, *, settled: bool, elsewhere: bool) -> bool:
        if owned.backup is None:
            return bool(self._context.settings.replicas) or (elsewhere and settled)
        return settled and owned.backup.node_id != first.node_id and not self._run.is_leaving

    def _partners(self) -> list[bytes]:
        """Nodes whose death this node must notice soon: backups of its shards and owners of those it backs."""
        partners: dict[bytes, None] = {}
        for owned in self._store.owned.values():
            for contact in owned.targets():
                partners[contact.node_id] = None
        for backed in self._store.backed.values():
            partners[backed.owner.node_id] = None
        return list(partners)

    # -- learners -----------------------------------------------------------------------------------------------

    async def _teach(self, to: Contact, shards: list[int]) -> None:
        """Make a node the backup of shards: live deltas first, the states beside them, then a new term."""
        for batch in self._batches(shards):
            await self._teach_batch(to, batch)

    def _batches(self, shards: list[int]) -> list[list[int]]:
        batches: list[list[int]] = []
        room = 0
        for shard in shards:
            size = 12 * self._store.size(shard)
            if not batches or size > room:
                batches.append([])
                room = BATCH_BYTES
            batches[-1].append(shard)
            room -= size
        return batches

    async def _teach_batch(self, to: Contact, shards: list[int]) -> None:
        me = self._context.me()
        lessons: dict[int, Term] = {}
        asked: list[OwnerInfo] = []
        for shard in shards:
            owned = self._store.owned.get(shard)
            if owned is not None and owned.learner is None and not owned.moving:
                lessons[shard] = self._store.promise(shard)
                asked.append(OwnerInfo.of(shard, owned.term, me))
        if not asked:
            return
        learn = Learn(self._context.genesis, asked, [lessons[where.shard].number for where in asked])
        verdict = await self._rpc.ask(to, "learn", learn, TransferResult, QUESTION_TIMEOUT_S)
        self._store.note(verdict.others)
        snapshots: list[tuple[StateHead, ShardState]] = []
        try:
            turn = LoopYielder()
            for shard in verdict.taken:
                # From here to the end of the turn nothing else runs: snapshot and first live delta leave no gap.
                owned, term = self._store.owned.get(shard), lessons.get(shard)
                if owned is None or term is None or owned.promised != term.number:
                    continue  # the term has risen since: the lesson counts no more
                if owned.learner is None and not owned.moving:
                    snapshots.append((describe(shard, term, owned.state), owned.state.copy()))
                    owned.learner = to
                    owned.has_told(to.node_id, owned.closed)
                    await turn.after(self._store.size(shard))
            if not snapshots:
                return
            heads = [head for head, _ in snapshots]
            message = StateTransfer(self._context.genesis, heads)
            async with self._rpc.request("state", to, message, state_stream.body(snapshots)) as answer:
                taken = self._rpc.decoded(to, answer.head, TransferResult).taken
            for head in heads:
                if head.shard in taken:
                    self._promote_learner(head, to)
        finally:
            for head, _ in snapshots:
                owned = self._store.owned.get(head.shard)
                if owned is not None and owned.learner == to:
                    owned.learner = None

    def _promote_learner(self, head: StateHead, to: Contact) -> None:
        owned = self._store.owned.get(head.shard)
        if owned is None or owned.learner != to or owned.promised != head.term.number:
            return
        me = self._context.me()
        former = self._store.appoint(head.shard, to, head.term, me, self._clock.monotonic())
        if former is not None:
            where = OwnerInfo.of(head.shard, head.term, me)
            key = former.node_id + head.shard.to_bytes(4, "big")
            self._start("release", key, partial(self._release, former, where))

    async def _release(self, former: Contact, where: OwnerInfo) -> None:
        """Free the memory of a former backup; should it not hear this, what it has ranks below the new one's."""
        message = Release(self._context.genesis, [where])
        await self._rpc.ask(former, "release", message, TransferResult, QUESTION_TIMEOUT_S)

    # -- hand-over ----------------------------------------------------------------------------------------------

    async def _hand_over(self, to: Contact, shards: list[int]) -> None:
        """Make the backup the owner and become its backup: one round trip, after the deltas in flight have landed."""
        wheres = []
        for shard in shards:
            owned = self._store.owned.get(shard)
            if owned is not None and owned.backup is not None and owned.backup.node_id == to.node_id:
                owned.moving = True
                wheres.append(OwnerInfo.of(shard, self._hand_over_term(shard), to))
        if not wheres:
            return
        if not await self._serving.drained([where.shard for where in wheres], DRAIN_S):
            for where in wheres:
                if (owned := self._store.owned.get(where.shard)) is not None:
                    owned.moving = False
            return
        # Some may have been lost, or have lost their backup, while the deltas in flight landed.
        wheres = [where for where in wheres if self._is_moving(where)]
        moving = [self._store.owned[where.shard] for where in wheres]
        known = [owned.state.known_count for owned in moving]
        message = HandOver(self._context.genesis, wheres, known, [owned.untold(to.node_id) for owned in moving])
        # When no answer comes, nobody knows who owns: `moving` stays, and the next look asks again.
        verdict = await self._rpc.ask(to, "hand_over", message, TransferResult, QUESTION_TIMEOUT_S)
        taken = dict.fromkeys(verdict.taken)
        # Refused because an earlier call was heard after all? Then this tells, before anything is done about it.
        self._store.note(verdict.others)
        for where in wheres:
            owned = self._store.owned.get(where.shard)
            if where.shard in taken:
                if owned is not None:
                    self._store.demote(where.shard, to, where.term)
                if not self._context.settings.replicas:
                    self._store.backed.pop(where.shard, None)
            elif owned is not None and owned.moving:
                self._store.drop_backup(where.shard, self._context.me())
        if taken:
            self._log.info("shards_handed_over", count=len(taken), to=to.node_id.hex()[:8])

    def _is_moving(self, where: OwnerInfo) -> bool:
        owned = self._store.owned.get(where.shard)
        return owned is not None and owned.moving and owned.promised == where.term_number

    def _hand_over_term(self, shard: int) -> Term:
        """Above all this node has had or promised, and promised from now on."""
        return self._store.promise(shard)

    async def leave(self, timeout_s: float) -> int:
        """Hand over everything owned; returns how many shards are left when nobody takes them or time is up."""
        self._run.enter(Phase.LEAVING)
        try:
            async with asyncio.timeout(timeout_s):
                while self._store.owned and self._view.has_eligible_others():
                    self._rebalance.wake()
                    await asyncio.sleep(RECHECK_S)
        except TimeoutError:
            pass
        return len(self._store.owned)
