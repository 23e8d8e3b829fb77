"""How long a barrier waits for a peer that does not move, by what the swarm takes for a step. Pure.

What a peer announces of itself does not prolong it: a member could announce an hour for a step, or a first step that
never ends, and all others would wait. The measure is the (upper) median of the other nodes, this one included. Where
there is only one peer, no other can be asked: then its own announcement counts, up to `LONGEST_UNPROVEN_S`.
"""

from __future__ import annotations

from collections.abc import Iterable

from overlay.peers import STALL_FLOOR_S, STALL_STEPS

#: A peer whose pace no third node shows is waited for at most this long without progress: in a pair, or in the first
#: step while all others are in theirs. Compiling a large model takes minutes.
LONGEST_UNPROVEN_S = 600.0


def longest_idle_s(own_s: float, others_s: Iterable[float], announced_s: float) -> float:
    """How long a peer may be without progress. `own_s` is the step time of this node, `others_s` are those that further
    peers announce, `announced_s` is its own."""
    others = [seconds for seconds in others_s if seconds > 0.0]
    if not others:
        return max(STALL_FLOOR_S, min(STALL_STEPS * max(own_s, announced_s), LONGEST_UNPROVEN_S))
    return max(STALL_FLOOR_S, STALL_STEPS * _median([own_s, *others]))


def longest_first_step_s(ended_s: Iterable[float]) -> float:
    """How long a first step may take: `ended_s` are the times of the nodes that have ended theirs, this one included.

    With one such node nothing is known: it may be the only one that need not compile.
    """
    known = list(ended_s)
    return LONGEST_UNPROVEN_S if len(known) < 2 else max(STALL_FLOOR_S, STALL_STEPS * _median(known))


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
