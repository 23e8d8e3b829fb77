"""The compiled engine: the same history as `engine`, for large swarms; numba turns these functions into machine code.

Never imported but by `run`, which knows whether numba is there. What it leaves to the reference engine: churn, message
delay, biased samplers, custom barriers, and held samples with a quantile. Its barrier is arithmetic in `kernel_parts`;
tests prove it equal to `training.barriers` on every small case, and whole histories equal event by event.
"""
# numba types these functions, not mypy: machine words and bare arrays would only be casts to it.
# mypy: ignore-errors

from __future__ import annotations

import numpy as np
from numba import njit

from training.simulation.kernel_parts import (
    BLOCKED,
    COMPLETED,
    DURATIONS,
    LAST_PASS,
    NEXT,
    SAMPLES,
    WAITED,
    begin_streams,
    count_below,
    draw_all,
    find,
    grown,
    insert,
    keep_moment,
    laggard,
    most_laggards,
    pop,
    renew,
    sample_passes,
    step_seconds,
)
from training.simulation.samplers import REJECTION

#: Disciplines, in the order of `plan.DISCIPLINES`.
EVENT, REPOLL, HOLD, POOL = range(4)
#: Places in `totals`.
UPDATES, PASSES, TESTS, QUERIES, GAPS = range(5)
#: Completions between two notes of progress.
NOTE_EVERY = 0xFFFF


@njit(cache=True)
def let_go(node, now, words, whole, reals, head, per_s, totals, squares, gaps, keep_trace, model, slow):
    """The node passes its barrier and begins its next step. Returns `gaps`, which may have grown."""
    whole[node, BLOCKED] = 0
    reals[node, WAITED] += now - reals[node, COMPLETED]
    gap = totals[UPDATES] - whole[node, LAST_PASS]
    whole[node, LAST_PASS] = totals[UPDATES]
    totals[GAPS] += gap
    squares[0] += float(gap) * gap
    if keep_trace:
        if totals[PASSES] >= gaps.size:
            gaps = grown(gaps)
        gaps[totals[PASSES]] = gap
    totals[PASSES] += 1
    insert(node, now + step_seconds(node, words, model, slow), whole, reals, head, per_s)
    return gaps


@njit(cache=True)
def run(
    nodes,
    duration_s,
    model,
    slow,
    discipline,
    complete,
    samples,
    lag,
    quantile,
    beta,
    self_sampled,
    repoll_s,
    pool_size,
    pool_renewal_s,
    origins,
    moments_s,
    keep_trace,
    buckets,
    per_s,
    shown,
):
    """One run; `run._compiled` says what goes in, `Outcome` what comes out.

    `shown` float64[1] holds the share that is done, for a progress bar in another thread; a negative value stops.
    """
    words = np.zeros((nodes, 8), np.uint64)
    whole = words.view(np.int64)
    reals = words.view(np.float64)
    begin_streams(words, DURATIONS, origins[0])
    begin_streams(words, SAMPLES, origins[1])
    steps = np.zeros(nodes, np.int32)
    head = np.full(buckets, -1, np.int32)
    most_beta = max(1, beta.max())
    drawn = np.empty(most_beta, np.int32)

    pooled = discipline == POOL and samples and not complete and nodes - 1 > pool_size
    pool = np.empty((nodes if pooled else 1, pool_size if pooled else 1), np.int32)
    renewed_s = np.zeros(nodes if pooled else 1, np.float64)
    oldest = np.zeros(nodes if pooled else 1, np.int32)
    finding = np.empty((nodes if pooled else 1, 1), np.uint64)
    begin_streams(finding, 0, origins[2])
    if pooled:
        for node in range(nodes):
            for place in range(pool_size):
                pool[node, place] = find(node, nodes, finding)
    every_s = pool_renewal_s / pool_size

    total = pool_size if pooled else nodes
    shuffles = most_beta * REJECTION > total
    order = np.arange(total if shuffles else 1).astype(np.int32)
    swaps = np.empty(total if shuffles else 1, np.int32)

    told = samples and (discipline == EVENT or discipline == HOLD)
    holding = samples and discipline == HOLD and not complete
    held = np.empty((nodes if holding else 1, most_beta if holding else 1), np.int32)
    held_count = np.zeros(nodes if holding else 1, np.int32)
    waiters = np.full(nodes if holding else 1, -1, np.int32)
    next_waiter = np.full(nodes if holding else 1, -1, np.int32)
    queue = np.empty(nodes if told else 1, np.int32)
    queued = 0

    # Nodes per number of completed steps: complete barriers need no more, and look no further than the lowest.
    levels = np.zeros(1024, np.int64)
    levels[0] = nodes
    lowest = 0
    allowed = most_laggards(nodes - 1, quantile)

    totals = np.zeros(5, np.int64)
    squares = np.zeros(1, np.float64)
    trace_s = np.zeros(1024 if keep_trace else 1, np.float64)
    trace_node = np.zeros(1024 if keep_trace else 1, np.int64)
    gaps = np.zeros(1024 if keep_trace else 1, np.int64)
    kept = np.zeros((moments_s.size, 4), np.float64)
    moment = 0
    last_day = int(duration_s * per_s)
    day = 0

    for node in range(nodes):
        insert(node, step_seconds(node, words, model, slow), whole, reals, head, per_s)
    while True:
        node, day = pop(day, last_day, whole, reals, head, per_s)
        now = np.inf
        if node >= 0 and reals[node, 0] <= duration_s:
            now = reals[node, 0]
        while moment < moments_s.size and moments_s[moment] < now:
            keep_moment(kept[moment], steps)
            moment += 1
        if now == np.inf:
            break

        rose = False
        finished = whole[node, BLOCKED] == 0
        if finished:
            steps[node] += 1
            reals[node, COMPLETED] = now
            if keep_trace:
                if totals[UPDATES] >= trace_s.size:
                    trace_s = grown(trace_s)
                    trace_node = grown(trace_node)
                trace_s[totals[UPDATES]] = now
                trace_node[totals[UPDATES]] = node
            totals[UPDATES] += 1
            if totals[UPDATES] & NOTE_EVERY == 0:
                if shown[0] < 0.0:
                    break
                shown[0] = now / duration_s
            if complete:
                if steps[node] >= levels.size:
                    levels = grown(levels)
                levels[steps[node] - 1] -= 1
                levels[steps[node]] += 1
                while levels[lowest] == 0:
                    lowest += 1
                    rose = True

        if not told:
            free = True
            if samples:
                totals[TESTS] += 1
                if complete:
                    totals[QUERIES] += nodes - 1
                    free = count_below(levels, lowest, steps[node] - lag) <= allowed
                else:
                    totals[QUERIES] += min(beta[node], nodes - (not self_sampled))
                    if pooled:
                        renew(node, now, every_s, pool, oldest, renewed_s, finding, nodes)
                    barred = -1 if self_sampled or pooled else node
                    entries = pool[node if pooled else 0]
                    free = sample_passes(
                        node, words, steps, lag, quantile, beta[node], barred, entries, pooled, drawn, order, swaps
                    )
            if free:
                gaps = let_go(
                    node, now, words, whole, reals, head, per_s, totals, squares, gaps, keep_trace, model, slow
                )
            else:
                whole[node, BLOCKED] = 1
                insert(node, now + repoll_s, whole, reals, head, per_s)
            continue

        whole[node, BLOCKED] = 1
        if holding:
            barred = -1 if self_sampled else node
            held_count[node] = draw_all(node, words, beta[node], barred, nodes, drawn, order, swaps)
            for place in range(held_count[node]):
                held[node, place] = drawn[place]
            totals[TESTS] += 1
            totals[QUERIES] += held_count[node]
            # Look again: the node itself, and those that waited for it. Each waits for one peer at a time.
            next_waiter[node] = waiters[node]
            waiters[node] = -1
            rest = node
            while rest >= 0:
                waiting = rest
                rest = next_waiter[waiting]
                behind = -1
                for place in range(held_count[waiting]):
                    if laggard(steps[waiting], steps[held[waiting, place]], lag):
                        behind = held[waiting, place]
                        break
                if behind >= 0:
                    next_waiter[waiting] = waiters[behind]
                    waiters[behind] = waiting
                else:
                    gaps = let_go(
                        waiting, now, words, whole, reals, head, per_s, totals, squares, gaps, keep_trace, model, slow
                    )
            continue

        queue[queued] = node
        queued += 1
        if complete and discipline == HOLD:
            totals[TESTS] += 1
            totals[QUERIES] += nodes - 1
        else:
            totals[TESTS] += queued
            if complete:
                totals[QUERIES] += queued * (nodes - 1)
        # While the lowest step stays, a complete barrier has news for nobody but the newcomer.
        left = queued - 1 if complete and quantile >= 1.0 and not rose else 0
        for place in range(left, queued):
            waiting = queue[place]
            if complete:
                free = count_below(levels, lowest, steps[waiting] - lag) <= allowed
            else:
                barred = -1 if self_sampled else waiting
                totals[QUERIES] += min(beta[waiting], nodes - (not self_sampled))
                free = sample_passes(
                    waiting, words, steps, lag, quantile, beta[waiting], barred, pool[0], False, drawn, order, swaps
                )
            if free:
                gaps = let_go(
                    waiting, now, words, whole, reals, head, per_s, totals, squares, gaps, keep_trace, model, slow
                )
            else:
                queue[left] = waiting
                left += 1
        queued = left

    for node in range(nodes):
        if whole[node, BLOCKED]:
            reals[node, WAITED] += duration_s - reals[node, COMPLETED]
    updates = totals[UPDATES]
    waited_s = reals[:, WAITED].copy()
    return steps, waited_s, totals, squares[0], kept, trace_s[:updates], trace_node[:updates], gaps[: totals[PASSES]]
