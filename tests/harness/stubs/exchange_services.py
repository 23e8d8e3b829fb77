"""Services of the exchange over an `ExchangeContext`, for tests of one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from p2pnode.training.encoding.pull_codecs import change_codec
from p2pnode.training.encoding.table import CodecName
from p2pnode.training.exchange.backup import BackupHandler
from p2pnode.training.exchange.client.pull import PullClient
from p2pnode.training.exchange.delta import SentDeltas
from p2pnode.training.exchange.directory import OwnerDirectory
from p2pnode.training.exchange.owner.deltas import DeltaHandler
from p2pnode.training.exchange.owner.final_values import FinalValues
from p2pnode.training.exchange.owner.publishing import Publisher
from p2pnode.training.exchange.owner.reads import ReadHandler
from p2pnode.training.exchange.owner.validation import ShardInspector
from p2pnode.training.exchange.recovery.failover import Failover
from p2pnode.training.exchange.recovery.moves import ShardMoves
from p2pnode.training.exchange.recovery.reconciliation import SplitReconciler
from tests.harness.stubs.exchange_context import ExchangeContext, directory_of, route_finder_of


def publisher_of(context: ExchangeContext, choose: Callable[[], CodecName] | None = None) -> Publisher:
    """`choose`: the codec of changes; by default that of the settings."""
    settings = context.settings
    return Publisher(
        store=context.store,
        replica=context.replica,
        view=context.view,
        environment=context.environment,
        choose=choose or (lambda: change_codec(settings, context.codec.codec)),
        synchronous=context.synchronous,
    )


def final_values_of(context: ExchangeContext, directory: OwnerDirectory | None = None) -> FinalValues:
    """What a node serves and asks when training has ended."""
    return FinalValues(
        swarm=context.swarm,
        store=context.store,
        view=context.view,
        rpc=context.rpc,
        directory=directory or directory_of(context),
        rebalance=context.rebalance,
        environment=context.environment,
        synchronous=context.synchronous,
    )


def inspector_of(context: ExchangeContext) -> ShardInspector:
    """Looks at the shards that are served."""
    return ShardInspector(context.store, context.counters, context.rebalance, context.environment)


def reads_of(context: ExchangeContext) -> ReadHandler:
    """Serves pulls and copies."""
    return ReadHandler(
        store=context.store,
        replica=context.replica,
        run=context.run,
        view=context.view,
        rpc=context.rpc,
        rebalance=context.rebalance,
        counters=context.counters,
        final_values=final_values_of(context),
        publisher=publisher_of(context),
        inspector=inspector_of(context),
        synchronous=context.synchronous,
    )


def pull_client_of(context: ExchangeContext, directory: Any) -> PullClient:
    """Pulls from the owners that the directory names."""
    return PullClient(
        swarm=context.swarm,
        store=context.store,
        replica=context.replica,
        run=context.run,
        view=context.view,
        rpc=context.rpc,
        directory=directory,
        final_values=final_values_of(context, directory),
        inspector=inspector_of(context),
        counters=context.counters,
        environment=context.environment,
        settings=context.settings,
        codec=context.codec,
        synchronous=context.synchronous,
    )


def backup_of_node(context: ExchangeContext, sent: SentDeltas | None = None) -> BackupHandler:
    """What a node answers to the owners of the shards that it backs up; it serves their requests."""
    backup = BackupHandler(
        swarm=context.swarm,
        store=context.store,
        replica=context.replica,
        view=context.view,
        run=context.run,
        rpc=context.rpc,
        rebalance=context.rebalance,
        publisher=publisher_of(context),
        sent=sent or SentDeltas(),
        counters=context.counters,
        has_backups=bool(context.settings.replicas),
        synchronous=context.synchronous,
        environment=context.environment,
    )
    backup.register()
    return backup


def moves_of(context: ExchangeContext, publisher: Publisher, deltas: DeltaHandler) -> ShardMoves:
    return ShardMoves(
        swarm=context.swarm,
        store=context.store,
        rpc=context.rpc,
        deltas=deltas,
        publisher=publisher,
        counters=context.counters,
        has_backups=bool(context.settings.replicas),
        environment=context.environment,
    )


def reconciler_of(context: ExchangeContext, directory: OwnerDirectory, deltas: DeltaHandler) -> SplitReconciler:
    """It serves the requests of others."""
    reconciler = SplitReconciler(
        swarm=context.swarm,
        store=context.store,
        view=context.view,
        run=context.run,
        rpc=context.rpc,
        rebalance=context.rebalance,
        directory=directory,
        deltas=deltas,
        counters=context.counters,
        settings=context.settings,
        environment=context.environment,
    )
    reconciler.register()
    return reconciler


def failover_of(context: ExchangeContext, directory: OwnerDirectory) -> Failover:
    return Failover(
        swarm=context.swarm,
        store=context.store,
        replica=context.replica,
        run=context.run,
        view=context.view,
        rpc=context.rpc,
        rebalance=context.rebalance,
        directory=directory,
        routes=route_finder_of(context),
        environment=context.environment,
        is_synchronous=context.synchronous,
    )
