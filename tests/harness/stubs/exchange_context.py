"""An `ExchangeContext` over a scripted swarm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from p2pnode.overlay.environment import Environment
from p2pnode.training.encoding.codec_choice import CodecChoice
from p2pnode.training.exchange.directory import OwnerDirectory
from p2pnode.training.exchange.owner.deltas import DeltaHandler
from p2pnode.training.exchange.peer_score import PeerScore
from p2pnode.training.exchange.rpc import ExchangeRpc
from p2pnode.training.exchange.run_state import RebalanceRequests, RunState, SwarmView
from p2pnode.training.exchange.store.replica import Replica
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.swarm import Swarm
from tests.harness.environment.simulated import InlineExecutor, ListLog, MemoryDisk, Record, VirtualClock
from tests.harness.stubs.scripted_swarm import GENESIS, ScriptedSwarm
from tests.harness.swarms.exchange_swarm import StartEntropy


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeContext:
    """What the services under test are given."""

    swarm: Swarm
    environment: Environment
    genesis: bytes
    settings: ExchangeSettings
    stale_limit: int | None
    store: ShardStore
    replica: Replica
    run: RunState
    view: SwarmView
    rpc: ExchangeRpc
    rebalance: RebalanceRequests
    codec: CodecChoice


def context_of(swarm: ScriptedSwarm, store: ShardStore, *, settings: ExchangeSettings | None = None) -> ExchangeContext:
    """A context on the running virtual loop; its log is `records_of(context)`."""
    clock = VirtualClock()
    log = ListLog([], "", clock)
    run, score = RunState(incarnation=1), PeerScore(swarm.node_id, clock, log)
    plain = ExchangeSettings(codec="float32", weight="sum", outer_lr=1.0, outer_momentum=0.0)
    view: Any = swarm
    return ExchangeContext(
        swarm=view,
        environment=Environment(
            clock=clock,
            entropy=StartEntropy("context"),
            disk=MemoryDisk(),
            executor=InlineExecutor(),
            log=log,
        ),
        genesis=GENESIS,
        settings=settings or plain,
        stale_limit=None,
        store=store,
        replica=Replica(np.zeros(store.bounds[-1][1], np.float32), store.bounds),
        run=run,
        view=SwarmView(view, clock, run, score, has_backups=bool((settings or plain).replicas)),
        rpc=ExchangeRpc(swarm=view, genesis=GENESIS, clock=clock, score=score),
        rebalance=RebalanceRequests(store),
        codec=CodecChoice(settings or plain),
    )


def directory_of(context: ExchangeContext) -> OwnerDirectory:
    """Over the same swarm and store."""
    return OwnerDirectory(
        swarm=context.swarm,
        store=context.store,
        view=context.view,
        rpc=context.rpc,
        rebalance=context.rebalance,
        environment=context.environment,
    )


def deltas_of(context: ExchangeContext, **changes: Any) -> DeltaHandler:
    """The owner's side of a push; `changes` of its arguments."""
    given = {
        "swarm": context.swarm,
        "stale_limit": context.stale_limit,
        "settings": context.settings,
        "store": context.store,
        "view": context.view,
        "run": context.run,
        "rpc": context.rpc,
        "rebalance": context.rebalance,
        "codec": context.codec,
        "environment": context.environment,
    }
    return DeltaHandler(**{**given, **changes})


def records_of(owner: Any) -> list[Record]:
    """The events that were logged where a context, or an exchange, says."""
    return cast(ListLog, owner.environment.log).records
