"""The compiled engine's kernel: the history of the reference engine, for large swarms, in machine code by numba.

Imported only when an engine runs, because numba is optional. Not supported: churn, message delay, biased samplers,
custom barriers, and held samples with a quantile. The barrier is arithmetic in `kernel_parts`; tests compare it with
`training.barriers.predicates` on every small case, and whole histories event by event.
"""
# mypy cannot type these functions; numba does.
# `_nrt=False`: functions that create no array need no reference counts, which took half of the time. Same histories.
# mypy: ignore-errors

from __future__ import annotations

import numpy as np
from numba import njit

from p2pnode.training.simulation.engines.kernel_parts import (
    AT,
    BLOCKED,
    COMPLETED,
    DURATIONS,
    LAST_PASS,
    SAMPLES,
    WAITED,
    begin_streams,
    count_below,
    draw_all,
    find,
    insert,
    keep_moment,
    laggard,
    most_laggards,
    pop,
    renew,
    sample_passes,
    step_seconds,
)

#: Disciplines, in the order of `plan.DISCIPLINES`.
EVENT, REPOLL, HOLD, POOL = range(4)
#: Places in `totals`.
UPDATES, PASSES, TESTS, QUERIES, GAPS = range(5)


@njit(cache=True, inline="always")
def record_pass(node, now, whole, reals, totals, squares, gaps, keep_trace):
    """Record that the node passes its barrier; `gaps` is long enough."""
    whole[node, BLOCKED] = 0
    reals[node, WAITED] += now - reals[node, COMPLETED]
    gap = totals[UPDATES] - whole[node, LAST_PASS]
    whole[node, LAST_PASS] = totals[UPDATES]
    totals[GAPS] += gap
    squares[0] += float(gap) * gap
    if keep_trace:
        gaps[totals[PASSES]] = gap
    totals[PASSES] += 1


@njit(cache=True, inline="always")
def next_event(day, last_day, duration_s, whole, reals, head, per_s, moment, moments_s, kept, steps):
    """The node of the next event, or −1 at the end of the run; its day; and the next moment to record."""
    node, day = pop(day, last_day, whole, reals, head, per_s)
    now = np.inf
    if node >= 0 and reals[node, AT] <= duration_s:
        now = reals[node, AT]
    else:
        node = -1
    while moment < moments_s.size and moments_s[moment] < now:
        keep_moment(kept, moment, steps)
        moment += 1
    return node, day, moment


@njit(cache=True, inline="always")
def note_completion(row, node, now, reals, totals, trace_s, trace_node, keep_trace):
    """Record that the node whose state is in `row` has completed a step."""
    reals[row, COMPLETED] = now
    if keep_trace:
        trace_s[totals[UPDATES]] = now
        trace_node[totals[UPDATES]] = node
    totals[UPDATES] += 1


@njit(cache=True, inline="always")
def raised(levels, step, lowest):
    """Count one more node at `step` and one less below it; returns the lowest step of any node."""
    levels[step - 1] -= 1
    levels[step] += 1
    while levels[lowest] == 0:
        lowest += 1
    return lowest


@njit(cache=True, _nrt=False)
def begin(words, origins, pool, finding, head, per_s, model, slow):
    """Streams, pools, and the first step of every node."""
    kind, first, second, shift, trace = model
    slow_count, slow_share, slow_factor, transient = slow
    whole = words.view(np.int64)
    reals = words.view(np.float64)
    begin_streams(words, DURATIONS, origins[0])
    begin_streams(words, SAMPLES, origins[1])
    begin_streams(finding, 0, origins[2])
    if pool.shape[0] == words.shape[0]:
        for node in range(words.shape[0]):
            for place in range(pool.shape[1]):
                pool[node, place] = find(node, words.shape[0], finding)
    for node in range(words.shape[0]):
        seconds = step_seconds(
            node, node, words, kind, first, second, shift, trace, slow_count, slow_share, slow_factor, transient
        )
        insert(node, seconds, whole, reals, head, per_s)


@njit(cache=True, _nrt=False)
def advance(
    budget,
    scalars,
    words,
    steps,
    head,
    levels,
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
    every_s,
    pools,
    holds,
    moments_s,
    kept,
    traces,
    totals,
    squares,
    per_s,
):
    """Continue for `budget` completions; True at the end of the run. `compiled.CompiledEngine` makes the arguments.

    Arrays that grow are extended between two calls. Replacing one within the loop would cost a reference count per
    iteration, half of the time.
    """
    nodes = steps.size
    kind, first, second, shift, trace = model
    slow_count, slow_share, slow_factor, transient = slow
    pool, renewed_s, oldest, finding = pools
    held, held_count, waiters, next_waiter, queue, drawn, order, swaps = holds
    trace_s, trace_node, gaps = traces
    whole = words.view(np.int64)
    reals = words.view(np.float64)
    keep_trace = trace_s.size > 1
    pooled = pool.shape[0] == nodes
    is_notified = samples and discipline in (EVENT, HOLD)
    holding = is_notified and discipline == HOLD and not complete
    allowed = most_laggards(nodes - 1, quantile)
    last_day = int(duration_s * per_s)
    last_update = totals[UPDATES] + budget
    day, lowest, queued, moment = scalars[0], scalars[1], scalars[2], scalars[3]
    ended = False

    while totals[UPDATES] < last_update:
        node, day, moment = next_event(
            day, last_day, duration_s, whole, reals, head, per_s, moment, moments_s, kept, steps
        )
        if node < 0:
            ended = True
            break

        now = reals[node, AT]
        rose = False
        finished = whole[node, BLOCKED] == 0
        if finished:
            steps[node] += 1
            note_completion(node, node, now, reals, totals, trace_s, trace_node, keep_trace)
            if complete:
                before = lowest
                lowest = raised(levels, steps[node], lowest)
                rose = lowest > before

        if not is_notified:
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
                    free = sample_passes(
                        node, words, steps, lag, quantile, beta[node], barred, pool, pooled, drawn, order, swaps
                    )
            if free:
                record_pass(node, now, whole, reals, totals, squares, gaps, keep_trace)
                seconds = step_seconds(
                    node, node, words, kind, first, second, shift, trace, slow_count, slow_share, slow_factor, transient
                )
                insert(node, now + seconds, whole, reals, head, per_s)
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
            # Test the node itself, and those that waited for it. Each waits for one peer at a time.
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
                    record_pass(waiting, now, whole, reals, totals, squares, gaps, keep_trace)
                    seconds = step_seconds(
                        waiting,
                        waiting,
                        words,
                        kind,
                        first,
                        second,
                        shift,
                        trace,
                        slow_count,
                        slow_share,
                        slow_factor,
                        transient,
                    )
                    insert(waiting, now + seconds, whole, reals, head, per_s)
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
        # While the lowest step stays the same, only the newly blocked node can pass a complete barrier.
        left = queued - 1 if complete and quantile >= 1.0 and not rose else 0
        for place in range(left, queued):
            waiting = queue[place]
            if complete:
                free = count_below(levels, lowest, steps[waiting] - lag) <= allowed
            else:
                barred = -1 if self_sampled else waiting
                totals[QUERIES] += min(beta[waiting], nodes - (not self_sampled))
                free = sample_passes(
                    waiting, words, steps, lag, quantile, beta[waiting], barred, pool, False, drawn, order, swaps
                )
            if free:
                record_pass(waiting, now, whole, reals, totals, squares, gaps, keep_trace)
                seconds = step_seconds(
                    waiting,
                    waiting,
                    words,
                    kind,
                    first,
                    second,
                    shift,
                    trace,
                    slow_count,
                    slow_share,
                    slow_factor,
                    transient,
                )
                insert(waiting, now + seconds, whole, reals, head, per_s)
            else:
                queue[left] = waiting
                left += 1
        queued = left

    scalars[0], scalars[1], scalars[2], scalars[3] = day, lowest, queued, moment
    return ended


@njit(cache=True)
def waited(words, duration_s):
    """Seconds waited per node, those of the nodes that still wait included."""
    whole = words.view(np.int64)
    reals = words.view(np.float64)
    seconds = reals[:, WAITED].copy()
    for node in range(words.shape[0]):
        if whole[node, BLOCKED]:
            seconds[node] += duration_s - reals[node, COMPLETED]
    return seconds
