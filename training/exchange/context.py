"""What the services of one node's exchange share. No field changes during a run; each service has its own state."""

from __future__ import annotations

from dataclasses import dataclass, field

from overlay.environment import Environment
from overlay.peers import Contact
from training.exchange.codec_choice import CodecChoice
from training.exchange.counters import Counters
from training.exchange.kept_deltas import KeptDeltas
from training.exchange.rebalance_requests import RebalanceRequests
from training.exchange.rpc import ExchangeRpc
from training.exchange.run_state import RunState
from training.exchange.store.push_record import PushRecord
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
    #: Which they were, for the time after a restart.
    record: PushRecord = field(default_factory=PushRecord)

    def lied(self, node: bytes, reason: str) -> None:
        """A member has sent what no honest one sends; a repeated liar is left out (`training.exchange.trust`)."""
        if node == self.swarm.node_id:
            return  # handed on by this node itself
        if (found := self.view.trust.note(node, reason, self.environment.clock.monotonic())) is None:
            self.environment.log.debug("member_lied", source=node.hex()[:8], reason=reason)
            return
        self.environment.log.warning("member_distrusted", source=node.hex(), reason=found.reason, lies=found.lies)
        self.view.invalidate()
        self.rebalance.wake()

    def me(self) -> Contact:
        return Contact(self.swarm.node_id, self.swarm.address)

    def jitter(self) -> float:
        """A factor of 0.5 to 1.5, so that many nodes do not retry at the same moments."""
        return self.environment.entropy.random.uniform(0.5, 1.5)
