"""Rules of a step: what a delta weighs, and when a node is behind. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from p2pnode.overlay.peers import STALL_FLOOR_S, STALL_STEPS
from p2pnode.training.encoding.table import CodecName
from p2pnode.training.shards.outer_rule import is_plain
from p2pnode.training.swarm import Swarm

#: A delta weighs by its samples between these multiples of its share.
SAMPLE_WEIGHT_RANGE = (0.25, 4.0)


def delta_weight(kind: str, workers: float, samples: int, theirs: Sequence[int]) -> float:
    """The weight of a delta under `exchange.weight` = `kind`, of a node that trained `samples` samples beside others
    that trained `theirs`; 0 or less: not known."""
    if kind == "sum":
        return 1.0
    share = 1.0 / max(1.0, workers)
    if kind == "population" or samples <= 0:
        return share
    known = [count for count in theirs if count > 0]
    mean = (samples + sum(known)) / (1 + len(known))
    low, high = SAMPLE_WEIGHT_RANGE
    return share * min(max(samples / mean, low), high)


def sharers(workers: float, training: int, ended: int) -> float:
    """How many nodes share a step, of `workers` that train now. Of those known to this node `training` train, itself
    included, and `ended` have ended their run with that step or a later one. Their deltas of the step have counted with
    this share: the last steps of the slowest node weigh no more than theirs."""
    return workers * (1.0 + ended / max(1, training))


def pushed_weight(weight: float, codec: CodecName, rate: float, *, synchronous: bool) -> float:
    """The weight by which the owners add a delta of this weight in this codec.

    Sparse deltas are added without the outer rule, by a rate of their own (`Agreement.rate`). No delta moves the values
    by more than itself. Under bsp the rate is 1: there no node's step begins with what its deltas lack.
    """
    if synchronous or not is_plain(codec):
        return weight
    return max(weight, min(1.0, rate * weight))


def was_away(idle_s: float, step_seconds: float) -> bool:
    """Whether a node of this step time has been without progress for so long that the others have stopped waiting for
    it (`Peer.is_worker`)."""
    return idle_s > max(STALL_FLOOR_S, STALL_STEPS * step_seconds)


def fell_behind(
    completed: int, base_step: int, former_base: int, stale_limit: int | None, awaited_from: int | None = None
) -> bool:
    """Whether a node goes on at the step of the others, and skips the steps between.

    It does if they made more than half of `stale_limit` steps since it last loaded their values: its deltas would soon
    be late. A node that was away does so too if they wait for it. No node of ordinary speed gets there: barriers hold
    the others back before. One that was stopped would make up its steps one after the other. Those who sample it would
    wait meanwhile, and it would train its last steps alone.

    `base_step` is the median step of the swarm now, `former_base` the one when the node last loaded values. For a node
    that was away `awaited_from` is the step below which a node at `base_step` waits for it; None for others.
    """
    if stale_limit is None or base_step <= completed:
        return False
    is_awaited = awaited_from is not None and completed < awaited_from
    return is_awaited or base_step - former_base > stale_limit // 2


def node_index(swarm: Swarm, now: float) -> int:
    """How many of the known workers have a lower id; scripts let number 0 do what one node should do."""
    return sum(peer.node_id < swarm.node_id and peer.is_worker(now) for peer in swarm.members())
