"""What the services of one node's exchange share. No field changes while they run; each service has its own state."""

from __future__ import annotations

from dataclasses import dataclass, field

from overlay.environment import Environment
from overlay.peers import Contact
from training.exchange.codec_choice import CodecChoice
from training.exchange.cooperative import LoopTurns
from training.exchange.counters import Counters
from training.exchange.kept_deltas import KeptDeltas
from training.exchange.rebalance_requests import RebalanceRequests
from training.exchange.recovery.acknowledged import AcknowledgedDeltas
from training.exchange.rpc import ExchangeRpc
from training.exchange.run_state import RunState
from training.exchange.store.replica import Replica
from training.exchange.store.shard_store import ShardStore
from training.exchange.swarm_view import SwarmView
from training.settings import ExchangeSettings
from training.swarm import Swarm


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeContext:
    """`synchronous`: the barrier family is bsp. `stale_limit`: a delta whose base is more steps behind the median is
    refused; None: none is."""

    swarm: Swarm
    environment: Environment
    genesis: bytes
    settings: ExchangeSettings
    synchronous: bool
    stale_limit: int | None
    store: ShardStore
    replica: Replica
    run: RunState
    view: SwarmView
    rpc: ExchangeRpc
    rebalance: RebalanceRequests
    codec: CodecChoice
    counters: Counters = field(default_factory=Counters)
    #: This node's own deltas on their way.
    kept: KeptDeltas = field(default_factory=KeptDeltas)
    #: Those that have arrived, for as long as they may have to be sent again.
    acknowledged: AcknowledgedDeltas = field(default_factory=AcknowledgedDeltas)

    @property
    def turns(self) -> LoopTurns:
        """The turns of the loop, which all passes over values and messages share."""
        return self.rpc.turns

    def nonsense(self, node: bytes, reason: str) -> None:
        """A member has sent what no healthy one sends; one that does so repeatedly is ignored for a while."""
        if node == self.swarm.node_id:
            return  # handed on by this node itself
        self.environment.log.debug("nonsense_received", source=node.hex()[:8], reason=reason)
        self.view.score.nonsense(node)
        self.rebalance.wake()

    def me(self) -> Contact:
        return Contact(self.swarm.node_id, self.swarm.address)

    def jitter(self) -> float:
        """A factor of 0.5 to 1.5, so that many nodes do not retry at the same moments."""
        return self.environment.entropy.random.uniform(0.5, 1.5)
