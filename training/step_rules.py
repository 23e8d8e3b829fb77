"""Rules of a step: what a delta weighs, and when a node is behind. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from overlay.peers import STALL_FLOOR_S, STALL_STEPS
from training.encoding.codecs import CodecName, Vector
from training.settings import ExchangeSettings
from training.shards.outer_rule import is_plain
from training.swarm import Swarm

#: A delta weighs by its samples between these multiples of its share.
SAMPLE_WEIGHT_RANGE = (0.25, 4.0)
#: How much of the delta under way the next step's training begins with. What is trained is never thrown away: with 0,
#: or with a share of it, and a momentum of the owners the model falls apart.
CARRY = 1.0


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


def pushed_weight(settings: ExchangeSettings, weight: float, codec: CodecName, *, synchronous: bool) -> float:
    """The weight by which the owners add a delta of this weight in this codec.

    Sparse deltas are added without the outer rule. What they lack arrives later, so the swarm follows the nodes from
    afar; a rate of `exchange.sparse_lr` brings it nearer. No delta moves the values by more than itself. Under bsp the
    rate is 1: there no node's step begins with what its deltas lack.
    """
    if synchronous or not is_plain(codec):
        return weight
    return max(weight, min(1.0, settings.sparse_lr * weight))


def own_carry(settings: ExchangeSettings, weight: float, *, together: bool, is_apart: bool = False) -> float:
    """How much of its acknowledged delta of this weight a node's next step begins with, when it does not overlap.

    The values it pulls have `weight` of the delta and lack the rest, and others change them until the next delta
    arrives. Both make directions that every node corrects in each step swing; a part of the rest damps that. Where
    nodes step `together`, under bsp or by `barrier.grace`, the values have the whole deltas of all. A sparse delta
    includes what those before it lacked (`StepExchange.prepare`). So does one that was trained while no owner was in
    reach (`is_apart`): the next step begins with the whole of it.
    """
    if is_apart:
        return CARRY
    if together or not settings.enabled:
        return 0.0
    return settings.carry * max(0.0, 1.0 - weight)


def base_of(vector: Vector, delta: Vector, carry: float, into: Vector | None = None) -> Vector:
    """What a step with this carry begins with: `vector + carry · delta`, all `float32[total]`; `into` may be reused."""
    base = np.empty_like(vector) if into is None else into
    if not carry:
        base[:] = vector  # whatever the delta is
        return base
    np.multiply(delta, np.float32(carry), out=base)
    base += vector
    return base


def correct(delta: Vector, base: Vector, vector: Vector, share: float) -> None:
    """Take `share` of what the others have moved since a step began off its delta: `delta −= share · (vector − base)`.
    `base` is overwritten.

    Where all nodes correct the same error each step does it again for what the others have corrected meanwhile. In such
    a direction a step's training would have ended so much shorter, had it begun with the present values (delay
    compensation, Zheng et al. 2017, with one constant in place of the curvature).
    """
    base -= vector
    base *= np.float32(share)
    delta += base


def was_away(idle_s: float, step_seconds: float) -> bool:
    """Whether a node of this step time has been without progress for so long that the others have stopped waiting for
    it (`Peer.is_worker`)."""
    return idle_s > max(STALL_FLOOR_S, STALL_STEPS * step_seconds)


def fell_behind(
    completed: int, base_step: int, former_base: int, stale_limit: int | None, awaited_from: int | None = None
) -> bool:
    """Whether a node goes on at the step of the others, because they made so many steps since it last loaded their
    values: more than half of those after which its delta would be late, or, if it was away, any for which they wait.
    No node of ordinary speed gets there: barriers hold the others back before. One that was stopped would make its
    steps up one after the other, while those who sample it wait, and would train its last ones alone.

    `base_step` is the median step of the swarm now, `former_base` was that of the values which were loaded then. For
    a node that was away `awaited_from` is the step below which a node at `base_step` waits for it; None for others.
    """
    if stale_limit is None or base_step <= completed:
        return False
    is_awaited = awaited_from is not None and completed < awaited_from
    return is_awaited or base_step - former_base > stale_limit // 2


def node_index(swarm: Swarm, now: float) -> int:
    """How many of the known workers have a lower id; scripts let number 0 do what one node should do."""
    return sum(peer.node_id < swarm.node_id and peer.is_worker(now) for peer in swarm.members())
