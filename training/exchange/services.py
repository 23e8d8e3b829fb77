"""The services of one node's exchange over one context: built together, started together, ended together.

When the shards are divided, services of the parts follow these (`former`). What they have learnt that is not of single
shards goes on with them; what is under way ends with these, and its requests are repeated by whoever sent them.
"""

from __future__ import annotations

import asyncio
import dataclasses

from overlay.peers import PeerChange
from overlay.supervision import supervised
from training.exchange.backup.handler import BackupHandler
from training.exchange.claims import SelfClaims
from training.exchange.client.codec_control import CodecControl
from training.exchange.client.pull import PullClient
from training.exchange.client.push import PushClient
from training.exchange.client.values import SwarmValues
from training.exchange.context import ExchangeContext
from training.exchange.directory import OwnerDirectory
from training.exchange.divisions import Divisions
from training.exchange.fence_file import FenceFile
from training.exchange.kept_deltas import KeptDeltas
from training.exchange.owner.deltas import DeltaHandler
from training.exchange.owner.final_values import BufferAgreement, FinalValues
from training.exchange.owner.inspection import ShardInspector
from training.exchange.owner.publishing import Publisher
from training.exchange.owner.reads import ReadHandler
from training.exchange.rebalance_requests import RebalanceRequests
from training.exchange.recovery.acknowledged import AcknowledgedDeltas
from training.exchange.recovery.rebalancing import Rebalancer
from training.exchange.recovery.reconciliation import SplitReconciler
from training.exchange.recovery.start_comparison import StartComparison
from training.exchange.rpc import ExchangeRpc
from training.exchange.store.division import divide_replica
from training.exchange.store.repair_log import RepairLog
from training.exchange.store.replica import Replica
from training.exchange.store.shard_store import ShardStore
from training.exchange.trust_file import TrustFile
from training.manifest import Manifest
from training.settings import ExchangeSettings
from training.swarm import Swarm


def store_of(swarm: Swarm, manifest: Manifest, settings: ExchangeSettings) -> ShardStore:
    """An empty store of the shards of a run."""
    log = RepairLog(settings.log_bytes, settings.log_seconds if settings.enabled else 0.0)
    return ShardStore(swarm.node_id, manifest.bounds(), manifest.layout.parameter_total, manifest.rule, log)


def divided_context(whole: ExchangeContext, store: ShardStore, divisions: Divisions) -> ExchangeContext:
    """What the services of the parts share, whose store is this one; the services of the whole are halted."""
    replica = Replica(whole.replica.vector, store.bounds)
    divide_replica(whole.replica, replica)
    clock, trust, reliability = whole.environment.clock, store.ownership.trust, whole.view.reliability
    return dataclasses.replace(
        whole,
        genesis=divisions.genesis,
        store=store,
        replica=replica,
        rpc=ExchangeRpc(whole.swarm, divisions.genesis, clock, trust, reliability, divisions, whole.rpc.timeouts),
        rebalance=RebalanceRequests(store),
        claims=SelfClaims(),
        kept=KeptDeltas(),
        acknowledged=AcknowledgedDeltas(),
    )


class ExchangeServices:
    """All that serves and asks under one genesis."""

    def __init__(self, context: ExchangeContext, former: ExchangeServices | None = None) -> None:
        self.context = context
        self.fences: FenceFile = FenceFile(context) if former is None else former.fences
        self.trust: TrustFile = TrustFile(context) if former is None else former.trust
        self.deltas = DeltaHandler(context)
        self.final_values = FinalValues(context)
        self.publisher = Publisher(context)
        inspector = ShardInspector(context)
        self.reads = ReadHandler(context, self.final_values, self.publisher, inspector)
        self.backup = BackupHandler(context, self.publisher)
        self.directory = OwnerDirectory(context)
        self.buffers = BufferAgreement(context, self.directory, self.final_values)
        self.codec_control: CodecControl = CodecControl(context) if former is None else former.codec_control
        self.push_client: PushClient = (
            PushClient(context, self.directory, self.deltas) if former is None else former.push_client
        )
        self.values = SwarmValues(context, self.directory, self.deltas.values)
        self.pull_client = PullClient(context, self.directory, self.final_values, self.publisher, inspector)
        self.reconciler = SplitReconciler(context, self.directory, self.deltas)
        self.rebalancer = Rebalancer(context, self.directory, self.deltas, self.reconciler, self.publisher)
        self.comparison = StartComparison(context, self.directory)
        self._tasks: list[asyncio.Task[None]] = []
        if former is not None:
            self._follow(former)

    def _follow(self, former: ExchangeServices) -> None:
        factor = len(self.context.store) // len(former.context.store)
        self.fences.continue_with(self.context)
        self.codec_control.continue_with(self.context)
        self.deltas.take_from(former.deltas, factor)
        self.reconciler.returned = former.reconciler.returned
        self.rebalancer.take_from(former.rebalancer)
        self.comparison.take_from(former.comparison)
        self.push_client.divide(self.context, self.directory, self.deltas)

    def start(self) -> None:
        """Serve requests and start the background work."""
        self.context.rpc.serve_indirect()
        for handlers in (self.deltas, self.reads, self.backup):
            handlers.register()
        services = {
            "rebalancer": self.rebalancer.run,
            "fences": self.fences.run,
            "trust": self.trust.run,
            "start-comparison": self.comparison.run,
        }
        if self.context.store.holds_values:
            services["check-backups"] = self.deltas.values.rounds.check_backups
        self._tasks = [
            asyncio.create_task(supervised(name, service, self._on_fault), name=name)
            for name, service in services.items()
        ]

    def _on_fault(self, name: str, error: Exception) -> None:
        self.context.environment.log.error("exchange_service_failed", service=name, error=repr(error))

    def on_change(self, change: PeerChange) -> None:
        """A member has come, gone, or changed."""
        context = self.context
        self.reconciler.on_change(change)
        if change.kind == "restarted":
            context.store.on_restart(change.node_id, context.me())
        if change.kind in ("restarted", "dead", "left"):
            context.claims.forget(change.node_id)
        reliability = context.view.reliability
        if change.kind in ("restarted", "returned"):
            context.acknowledged.doubt(change.node_id)
            context.wait_credit.forgive(change.node_id)
            reliability.returned(change.node_id, context.environment.clock.monotonic())
        if change.kind in ("up", "restarted", "returned", "moved"):
            reliability.routes.reached(change.node_id)
        if change.kind == "dead":
            reliability.routes.died(change.node_id)
            context.rpc.found_dead(change.node_id)
        if change.kind in ("dead", "left", "eligible", "up", "returned", "restarted"):
            context.view.invalidate()
            context.rebalance.wake()

    async def halt(self) -> None:
        """End all that is under way, so that nothing changes any more; deltas of this node stay in the outbox. When
        this returns no request is being handled, and no task of these services runs."""
        await self.context.rpc.close()
        await asyncio.gather(self.push_client.halt(), self.deltas.halt(), self._end_tasks())

    async def stop(self) -> None:
        """Cancel all tasks; idempotent."""
        await asyncio.gather(self.push_client.stop(), self.values.stop())
        await self._end_tasks()

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
