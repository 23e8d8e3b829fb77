"""Event-driven sampling with groups of nodes: the distribution of the other engines, but not their history.

Under the discipline `event` every blocked node draws a fresh sample at every completion: P² tests per step. Blocked
nodes with the same number of completed steps are exchangeable: each passes with the same probability. It is the
probability of few enough laggards among β peers drawn without replacement. So each group draws the *number* of nodes
that pass, and then which ones. A thousand nodes take one second instead of a quarter of an hour.

The probability is a hypergeometric sum. Tests compare it with `training.barriers.predicates` by enumeration, and the
distribution of whole runs with the reference engine.
"""
# mypy cannot type these functions; numba does.
# mypy: ignore-errors

from __future__ import annotations

import math

import numpy as np
from numba import njit

from p2pnode.training.simulation.engines.event_kernel import (
    QUERIES,
    TESTS,
    UPDATES,
    next_event,
    note_completion,
    raised,
    record_pass,
)
from p2pnode.training.simulation.engines.kernel_parts import AT, BLOCKED, insert, most_laggards, step_seconds, uniform

#: Below this logarithm the probability that none passes is not a normal float.
MIN_LOG = -600.0


@njit(cache=True)
def pass_chances(others, beta, quantile):
    """float64[others + 1]: the probability that a sample of `beta` from `others` passes, by the number of laggards."""
    beta = min(beta, others)
    allowed = most_laggards(beta, quantile)
    log_factorial = np.zeros(others + 2, np.float64)
    for number in range(2, others + 2):
        log_factorial[number] = log_factorial[number - 1] + math.log(number)
    chances = np.zeros(others + 1, np.float64)
    ways = log_factorial[others] - log_factorial[beta] - log_factorial[others - beta]
    for laggards in range(others + 1):
        free = others - laggards
        chance = 0.0
        for behind in range(max(0, beta - free), min(allowed, laggards, beta) + 1):
            chance += math.exp(
                log_factorial[laggards]
                - log_factorial[behind]
                - log_factorial[laggards - behind]
                + log_factorial[free]
                - log_factorial[beta - behind]
                - log_factorial[free - beta + behind]
                - ways
            )
        chances[laggards] = min(1.0, chance)
    chances[0] = 1.0
    return chances


@njit(cache=True)
def binomial(words, count, chance):
    """How many of `count` pass; `words[0, 0]` is the stream. By inversion."""
    if chance >= 1.0:
        return count
    if chance <= 0.0:
        return 0
    log_none = count * math.log1p(-chance)
    if log_none < MIN_LOG:
        passed = 0
        for _ in range(count):
            passed += uniform(words, 0, 0) < chance
        return passed
    at = uniform(words, 0, 0)
    weight = math.exp(log_none)
    odds = chance / (1.0 - chance)
    passed = 0
    while at >= weight and passed < count:
        at -= weight
        weight *= odds * (count - passed) / (passed + 1)
        passed += 1
    return passed


@njit(cache=True, _nrt=False)
def advance(
    budget,
    scalars,
    words,
    steps,
    head,
    levels,
    waiting_levels,
    blocked,
    global_words,
    chances,
    duration_s,
    model,
    slow,
    lag,
    queried,
    moments_s,
    kept,
    traces,
    totals,
    squares,
    per_s,
):
    """As `event_kernel.advance`. `waiting_levels` counts blocked nodes per completed steps, `blocked` lists them."""
    kind, first, second, shift, trace = model
    slow_count, slow_share, slow_factor, transient = slow
    trace_s, trace_node, gaps = traces
    whole = words.view(np.int64)
    reals = words.view(np.float64)
    keep_trace = trace_s.size > 1
    last_day = int(duration_s * per_s)
    last_update = totals[UPDATES] + budget
    day, lowest, queued, moment, highest = scalars[0], scalars[1], scalars[2], scalars[3], scalars[4]
    ended = False
    while totals[UPDATES] < last_update:
        node, day, moment = next_event(
            day, last_day, duration_s, whole, reals, head, per_s, moment, moments_s, kept, steps
        )
        if node < 0:
            ended = True
            break
        now = reals[node, AT]
        steps[node] += 1
        step = steps[node]
        highest = max(highest, step)
        note_completion(node, node, now, reals, totals, trace_s, trace_node, keep_trace)
        lowest = raised(levels, step, lowest)
        whole[node, BLOCKED] = 1
        blocked[queued] = node
        queued += 1
        waiting_levels[step] += 1
        totals[TESTS] += queued
        totals[QUERIES] += queued * queried

        # Laggards of a group: nodes with fewer completed steps than the group's, less the allowed lag.
        laggards = 0
        for level in range(lowest, highest + 1):
            if level - lag - 1 >= lowest:
                laggards += levels[level - lag - 1]
            if waiting_levels[level] == 0:
                continue
            passed = binomial(global_words, waiting_levels[level], chances[laggards])
            waiting_levels[level] -= passed
            for _ in range(passed):
                while True:
                    place = int(uniform(global_words, 0, 0) * queued)
                    if steps[blocked[place]] == level:
                        break
                free = blocked[place]
                queued -= 1
                blocked[place] = blocked[queued]
                record_pass(free, now, whole, reals, totals, squares, gaps, keep_trace)
                seconds = step_seconds(
                    free, free, words, kind, first, second, shift, trace, slow_count, slow_share, slow_factor, transient
                )
                insert(free, now + seconds, whole, reals, head, per_s)
    scalars[0], scalars[1], scalars[2], scalars[3], scalars[4] = day, lowest, queued, moment, highest
    return ended
