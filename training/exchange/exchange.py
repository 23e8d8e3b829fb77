"""The exchange of one node: builds all that serves and asks, starts it and ends it.

Startup calls found, join or resume; the step loop push and pull; shutdown leave and close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.peers import Contact, PeerChange
from p2pnode.overlay.supervision import supervised
from p2pnode.training.cooperative import LoopYielder, off_loop
from p2pnode.training.encoding.codec_choice import CodecChoice, CodecControl
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.pull_codecs import change_codec
from p2pnode.training.encoding.step_bytes import StepShape
from p2pnode.training.exchange.client.outbox import Outbox
from p2pnode.training.exchange.client.pull import PullClient, PullReport
from p2pnode.training.exchange.client.push import PushClient
from p2pnode.training.exchange.delta import PushReport, SentDeltas
from p2pnode.training.exchange.directory import OwnerDirectory, RouteFinder
from p2pnode.training.exchange.owner.deltas import DeltaHandler
from p2pnode.training.exchange.owner.final_values import FinalValues
from p2pnode.training.exchange.owner.publishing import Publisher
from p2pnode.training.exchange.owner.reads import ReadHandler
from p2pnode.training.exchange.owner.replication import ForwardHandler
from p2pnode.training.exchange.owner.validation import ShardInspector
from p2pnode.training.exchange.peer_score import PeerScore
from p2pnode.training.exchange.recovery.failover import Failover
from p2pnode.training.exchange.recovery.moves import ShardMoves
from p2pnode.training.exchange.recovery.rebalancing import JobKind, Rebalancer
from p2pnode.training.exchange.recovery.reconciliation import SplitReconciler
from p2pnode.training.exchange.recovery.resending import Resending
from p2pnode.training.exchange.rpc import ExchangeRpc
from p2pnode.training.exchange.run_state import Phase, RebalanceRequests, RunState, SwarmView
from p2pnode.training.exchange.store.records import RepairLog, StoredState
from p2pnode.training.exchange.store.replica import Replica, ReplicaReading, has_known_owner
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import ZERO_TERM, FenceFile, Term
from p2pnode.training.manifest import Manifest
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.outer_rule import is_plain
from p2pnode.training.swarm import Swarm
from p2pnode.training.values.client import SwarmValues

#: Under relaxed barriers a pull ends when nothing has moved for this long; shards that were not received keep their
#: older values.
RELAXED_PULL_S = 5.0
#: Under bsp a pull waits through a silence of this length, which is enough to replace a failed owner.
DETECTION_BOUND_S = 10.0
#: A founder publishes the initial values of a model that is no larger: they cost it as much memory as the model, and a
#: node that stays alone has no use of them.
PUBLISHED_AT_START = 1 << 27
#: Named values that a node owns, in bytes, at least; their backups need the same memory on other nodes.
VALUE_BYTES = 512 << 20


class Exchange:
    """Owner and client of shards. `replica` is the trainer's shared vector, float32[total]."""

    def __init__(
        self,
        *,
        swarm: Swarm,
        manifest: Manifest,
        settings: ExchangeSettings,
        staleness: int | None,
        replica: Vector,
        incarnation: int,
        environment: Environment,
        value_bytes: int = VALUE_BYTES,
    ) -> None:
        """`value_bytes`: most bytes of named values that this node owns."""
        self.manifest, self.settings, self.environment = manifest, settings, environment
        self.synchronous = synchronous = manifest.barrier_family == "bsp"
        # Without a staleness no delta is too old.
        self.stale_limit = stale_limit = None if staleness is None else max(10, 4 * staleness)
        has_backups = bool(settings.replicas)
        self._log, clock = environment.log, environment.clock
        self._genesis, parameters = bytes.fromhex(manifest.genesis), manifest.layout.parameter_total
        genesis = self._genesis
        log = RepairLog(settings.log_bytes, settings.log_seconds)
        self.store = store = ShardStore(
            swarm.node_id, manifest.bounds(), parameters, manifest.rule, log, synchronous=synchronous
        )
        self.replica = Replica(replica, store.bounds)
        self.run, self.sent = RunState(incarnation), SentDeltas()
        run, counters = self.run, self.run.counters
        self.counters = counters
        score = PeerScore(swarm.node_id, clock, environment.log)
        has_steps = not store.holds_values
        self.view = view = SwarmView(swarm, clock, run, score, has_steps=has_steps, has_backups=has_backups)
        self.rpc = rpc = ExchangeRpc(swarm=swarm, genesis=genesis, clock=clock, score=score)
        self.rebalance = rebalance = RebalanceRequests(store)
        self.codec = codec = CodecChoice(settings)
        self._swarm, self._fences = swarm, FenceFile(store.ownership, genesis, environment)
        self.deltas = deltas = DeltaHandler(
            swarm, settings, store, view, run, rpc, rebalance, codec, environment, stale_limit=stale_limit
        )
        self.publisher = publisher = Publisher(
            store, self.replica, view, environment, choose=lambda: change_codec(settings, codec.codec)
        )
        self.forwards = ForwardHandler(store, view, rpc, self.sent, counters, environment)
        self.directory = directory = OwnerDirectory(swarm, store, view, rpc, rebalance, environment)
        self.final_values = FinalValues(swarm, store, view, rpc, directory, rebalance, environment)
        inspector = ShardInspector(store, counters, rebalance, environment)
        self.reads = ReadHandler(
            store, self.replica, run, view, rpc, rebalance, self.final_values, publisher, inspector
        )
        self.codec_control = CodecControl(
            codec, swarm.line, environment.log, self._step_shape, is_beside=not synchronous
        )
        self.outbox = Outbox(self.sent, swarm, store, view, rpc, directory, deltas, counters, environment)
        self.push_client = PushClient(
            settings, store, view, run, codec, rpc.turns, self.outbox, directory, deltas, environment
        )
        self.values = SwarmValues(
            node_id=swarm.node_id,
            run=run,
            store=store,
            view=view,
            rpc=rpc,
            rebalance=rebalance,
            replicator=deltas.replicator,
            in_flight=deltas.in_flight,
            directory=directory,
            limit_bytes=value_bytes,
            environment=environment,
        )
        if store.holds_values:
            deltas.values = self.values.handler
        self.pull_client = PullClient(
            swarm,
            store,
            self.replica,
            run,
            view,
            rpc,
            directory,
            self.final_values,
            inspector,
            environment,
            settings,
            codec,
            publisher,
        )
        self.reconciler = SplitReconciler(
            swarm, store, view, run, rpc, rebalance, directory, deltas, settings, environment
        )
        self.moves = ShardMoves(swarm, store, self.replica, view, run, rpc, rebalance, deltas, publisher, environment)
        routes = RouteFinder(swarm, store, view, rpc, rebalance, environment)
        self._failover = Failover(swarm, store, self.replica, run, view, rpc, rebalance, directory, routes, environment)
        resending = Resending(self.sent, store, view, run, rpc, self.reconciler, environment)
        self.rebalancer = Rebalancer(
            swarm=swarm,
            store=store,
            view=view,
            run_state=run,
            rpc=rpc,
            rebalance=rebalance,
            directory=directory,
            publisher=publisher,
            moves=self.moves,
            failover=self._failover,
            duties=[
                (JobKind.FIND_ROUTES, routes.due, routes.look),
                (JobKind.CONFIRM_BACKUP, self.moves.due, self.moves.ask),
                (JobKind.RESEND, resending.due, resending.send),
                (JobKind.RECONCILE, self.reconciler.due, lambda _: self.reconciler.reconcile()),
            ],
            settings=settings,
            environment=environment,
        )
        self._tasks: list[asyncio.Task[None]] = []

    def reading(self, pause: Callable[[], None]) -> ReplicaReading:
        """The replica, for a thread to write to disk (`pause`: see `ReplicaReading`)."""
        return ReplicaReading(self.replica, pause)

    def begin_at(self, step: int) -> None:
        """Set the step to start from: that of the restored checkpoint."""
        self.run.step = step

    def advance(self, step: int) -> None:
        """Record that this node completed a step, and invalidate the swarm view."""
        self.run.step, self.run.has_begun = step, True
        self.view.invalidate()

    async def start(self) -> None:
        """Serve requests and start the background work."""
        self._swarm.on_change(self._on_change)
        self.rpc.serve_indirect()
        for handlers in (self.deltas, self.forwards, self.moves, self.reads, self.reconciler, self.final_values):
            handlers.register()
        services = {"rebalancer": self.rebalancer.run, "fences": self._fences.run}
        if self.store.holds_values:
            self.values.handler.register()
            services["check-backups"] = self.values.handler.rounds.check_backups
        self._tasks = [
            asyncio.create_task(supervised(name, service, self._on_fault), name=name)
            for name, service in services.items()
        ]

    def _on_fault(self, name: str, error: Exception) -> None:
        self._log.error("exchange_service_failed", service=name, error=repr(error))

    def _on_change(self, change: PeerChange) -> None:
        """A member has come, gone, or changed."""
        self.reconciler.on_change(change)
        if change.kind == "restarted":
            self.store.on_restart(change.node_id, self.rpc.me)
        if change.kind in ("restarted", "returned"):
            self.sent.unconfirm(change.node_id)
        if change.kind in ("up", "restarted", "returned", "moved", "dead"):
            self.view.score.forget(change.node_id)
        if change.kind == "dead":
            self.rpc.found_dead(change.node_id)
        if change.kind in ("dead", "left", "eligible", "up", "returned", "restarted"):
            self.view.invalidate()
            self.rebalance.wake()

    # -- the start: a node has what its disk gives, and founds, resumes or joins the swarm -------------------------

    def offer(self, step: int, versions: list[tuple[Term, int]], states: dict[int, StoredState]) -> None:
        """What this node's disk has, before `start`: its step, the versions of the shards in the replica, and whole
        states. They count as copies in take-overs until the owners are known."""
        self.run.step = step
        self.replica.restore_versions(versions)
        self.store.offer_stored(states)

    async def found(self) -> int:
        """Own every shard that has no known owner, with the present replica as its initial value; returns how many."""
        now = self.environment.clock.monotonic()
        me, yielder, executor = self.rpc.me, LoopYielder(), self.environment.executor
        founded = 0
        for shard in range(len(self.store)):
            if has_known_owner(self.store, shard):
                continue
            await yielder.after(self.store.size(shard))
            former, version = self.replica.version_of(shard)
            values = self.replica.slice_of(shard)
            state = await off_loop(executor, values.size, self.store.fresh_state, shard, values, version=version)
            if has_known_owner(self.store, shard):
                continue  # another node claimed it meanwhile
            term = self.store.next_term(shard, former)
            self.store.own(shard, state, term, me, now, by_handover=False)
            if not self.store.holds_values:
                self.replica.set_version(shard, term, version)
                if not version and self.replica.vector.size <= PUBLISHED_AT_START:
                    await self.publisher.begin_run(self._genesis, shard, self.store.owned[shard])
            founded += 1
        return founded

    async def resume(self, expected: int, wait_s: float) -> None:
        """Resume a swarm that was shut down. Waits for `expected` nodes, takes over every shard without a known owner
        from its best copy, and founds the rest from this node's replica. Logs how many deltas the shards lost."""
        clean = bool(self.store.stored) and all(stored.clean for stored in self.store.stored.values())
        nodes = 1 + await self._failover.resume(expected, wait_s)
        founded = await self.found()
        if not self.store.holds_values:
            await self.pull_client.pull(self.run.step, silence_s=RELAXED_PULL_S)
        lost = self._failover.lost_in_restart()
        self.counters.lost_in_restarts += (count := sum(lost.values()))
        log = self._log.info if clean and not count else self._log.warning
        log(
            "swarm_resumed",
            nodes=nodes,
            expected=expected + 1,
            shards=len(self.store.owned),
            founded=founded,
            clean=clean,
            deltas_lost=count,
            deltas_lost_by_shard=lost,
        )
        self._owners_are_known()

    async def join(self, source: Contact) -> PullReport:
        """Learn the owners from a peer and pull the whole vector. Raises `TransportError`."""
        await self.directory.learn_all(source)
        if self.store.stored and not any(has_known_owner(self.store, shard) for shard in range(len(self.store))):
            self.rebalancer.allow_takeover()  # it owned them all, and those that have gone on may own none
        report = PullReport(0, [], [])
        if not self.store.holds_values:
            if all(term == ZERO_TERM for term, _ in self.replica.versions()):
                await self.pull_client.claim_initial_values(self._genesis)
            report = await self.pull_client.pull(self.run.step, silence_s=None)
        self._owners_are_known()
        return report

    def _owners_are_known(self) -> None:
        self.store.supersede_stored()
        self.rebalancer.allow_takeover()

    # -- a step -------------------------------------------------------------------------------------------------

    @property
    def is_apart(self) -> bool:
        """Whether the step that was trained last could be sent to no owner (`OwnerDirectory.is_apart`)."""
        return self.push_client.apart_since is not None

    async def push(
        self,
        step: int,
        base_step: int,
        weight: float,
        delta: Vector,
        *,
        on_encoded: Callable[[], None] = lambda: None,
        train_s: float = 0.0,
        is_last: bool = False,
    ) -> PushReport:
        """Push a delta that was trained in `train_s` seconds, in the codec that its line carries; see
        `PushClient.push`."""
        control, clock = self.codec_control, self.environment.clock
        if train_s:
            control.trained(train_s)
        control.before_push()
        began = clock.monotonic()
        report = await self.push_client.push(step, base_step, weight, delta, on_encoded=on_encoded, is_last=is_last)
        control.pushed(clock.monotonic() - began, is_complete=not report.outstanding)
        return report

    async def pull(self, step: int, sent: Vector | None = None) -> PullReport:
        """Bring the replica up to date. Under bsp the barrier of `step` has passed; otherwise it may pass meanwhile.
        `sent` is this node's last delta, `float32[total]`, as the owners have it."""
        silence_s = DETECTION_BOUND_S if self.synchronous else RELAXED_PULL_S
        return await self.pull_client.pull(step, silence_s=silence_s, sent=sent if is_plain(self.codec.codec) else None)

    @property
    def rate(self) -> float:
        """The rate of this node's next delta, if it is sparse."""
        return self.pull_client.agreement.rate(self.view.worker_count())

    def _step_shape(self) -> StepShape:
        """What a step of this node exchanges at present."""
        store, parameters = self.store, self.store.bounds[-1][1]
        total = max(1, parameters)  # a run of named values has no vector
        return StepShape(
            parameters=parameters,
            nodes=self.view.worker_count(),
            owned=sum(map(store.size, store.owned)) / total,
            backed=sum(map(store.size, store.backed)) / total,
        )

    def take_merged(self) -> dict[bytes, int]:
        """The nodes whose deltas were added here since the last call, each with its latest step."""
        return self.deltas.replicator.take_merged()

    # -- the end of training ------------------------------------------------------------------------------------

    async def flush(self, timeout_s: float) -> int:
        """Wait until the owners have all deltas of this node; returns how many steps they lack after `timeout_s`."""
        return await self.outbox.finish(timeout_s) + await self.values.finish(timeout_s)

    async def pull_final(self, step: int, timeout_s: float) -> PullReport:
        """Bring the replica to the final values, when no node trains any more: every node gets the same bits."""
        return await self.pull_client.pull(step, silence_s=timeout_s, is_final=True)

    def is_needed_by(self, node_id: bytes) -> bool:
        """Whether a node that has finished may still want final values that this node owns or backs up."""
        return bool(self.store.owned or self.store.backed) and not self.final_values.is_done(node_id)

    # -- leaving ------------------------------------------------------------------------------------------------

    async def leave(self, timeout_s: float) -> tuple[int, int]:
        """Deliver the outbox and hand over every shard; returns (steps not delivered, shards not handed over)."""
        left = await self.outbox.finish(timeout_s / 2) + await self.values.finish(timeout_s / 2)
        return left, await self.rebalancer.leave(timeout_s / 2)

    async def close(self, timeout_s: float) -> None:
        """Refuse new deltas, wait at most `timeout_s` for those in flight, and then add none."""
        self.run.enter(Phase.CLOSED)
        await self.deltas.drained(list(self.store.owned), timeout_s)
        self.run.enter(Phase.DRAINED)

    def is_clean(self) -> bool:
        """Whether this node is closed and `ShardStore.states_to_save` has every delta that it acknowledged."""
        return self.run.is_drained and all(stored.clean for stored in self.store.stored.values())

    async def stop(self) -> None:
        """Cancel all tasks; idempotent."""
        await asyncio.gather(self.outbox.stop(), self.values.stop())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
