"""What the services of one node's exchange share. No field changes while they run; each service has its own state."""

from __future__ import annotations

from dataclasses import dataclass, field

from overlay.environment import Environment
from training.codec_choice import CodecChoice
from training.cooperative import LoopTurns
from training.exchange.rebalance_requests import RebalanceRequests
from training.exchange.rpc import ExchangeRpc
from training.exchange.run_state import RunState
from training.exchange.store.replica import Replica
from training.exchange.store.shard_store import ShardStore
from training.exchange.swarm_view import SwarmView
from training.settings import ExchangeSettings
from training.swarm import Swarm


@dataclass(slots=True)
class Counters:
    """Bytes, refusals and losses since the start, for `/status` and `/metrics`."""

    bytes_sent: int = 0
    bytes_received: int = 0
    merged: int = 0  # shards of deltas added here as owner
    refused: int = 0  # this node's deltas, by owners
    refused_here: dict[str, int] = field(default_factory=dict)  # others' deltas, by this node, by reason
    unusual_norms: int = 0  # shards of deltas with a norm far above the median
    clipped: int = 0  # shards of deltas that were scaled down
    repaired: int = 0  # deltas of one shard from the other side of a split, added here
    followed: int = 0  # shards brought up to date by changes of their published value
    chains_entered: int = 0  # shards of which the published value was pulled as a whole
    chain_mismatches: int = 0  # shards with another digest after a pull than at their owner; pulled again as a whole
    lost_in_splits: int = 0  # acknowledged on this side of a split, and no longer in the log
    resigned_shards: int = 0  # of this node whose values were not finite, or out of range
    lost_in_restarts: int = 0  # what disks had, and the copies that the swarm was started again with had not
    sent_again: int = 0  # shards of deltas that an owner acknowledged and lost


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

    @property
    def turns(self) -> LoopTurns:
        """The turns of the loop, which all passes over values and messages share."""
        return self.rpc.turns
