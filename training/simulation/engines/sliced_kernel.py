"""Re-polled sampling for large swarms: draws from probabilities, as in `grouped_kernel`, and events that carry state.

With a known probability a test reads no other node. So a node's state is needed only at its own next event, of which
each node has exactly one. An event therefore *is* the node: a row of eight words that moves to a later slice of time.
Rows are appended to slices and read slice by slice, both sequentially; an array of nodes would miss the cache at every
event. The current slice is split into parts. One part at a time is processed: it fits into the cache, and its rows are
in buckets of time. Slices and parts are few, so that their pages stay in the TLB (a ladder queue: Tang, Goh, Thng, ACM
TOMACS 15 (2005) 175).

Events are ordered as in `event_kernel`, by time and then by node, and streams are consumed in the same way. Tests
compare the history with a single heap.
"""
# mypy cannot type these functions; numba does. `_nrt=False` as in `event_kernel`.
# mypy: ignore-errors

from __future__ import annotations

import math

import numpy as np
from numba import njit

from training.simulation.engines.event_kernel import QUERIES, TESTS, UPDATES, note_completion, raised, record_pass
from training.simulation.engines.kernel_parts import (
    AT,
    BLOCKED,
    COMPLETED,
    DURATIONS,
    SAMPLES,
    WAITED,
    begin_stream,
    count_below,
    step_seconds,
    uniform,
)

#: The column with node and progress: `node << NODE_SHIFT | completed steps`.
WHO = 4
NODE_SHIFT = 32
STEP_MASK = (1 << NODE_SHIFT) - 1
#: Rows per chunk: a page.
CHUNK = 64
#: Slices repeat cyclically; an event more than one cycle ahead stays in its slice. The parts follow the slices.
SLICES, PART_BITS = 1 << 10, 6
PARTS = 1 << PART_BITS
#: Positions in `scalars`. `PART` counts from time 0; `LOADED` is 0 while no part is loaded.
PART, LOWEST, BUCKET, MOMENT, LOADED, NEEDED = range(6)
#: Why `advance` returned: the budget is used up, the run has ended, or a part has more rows than `line`.
CONTINUE, ENDED, LONGER = range(3)


@njit(cache=True, _nrt=False)
def append(rows, place, slot, store, fills, newest, older, free):
    """Copy a row to the end of a slice or part. `free` is a stack of chunks; its first element counts them."""
    at = fills[slot]
    if at % CHUNK == 0:
        count = free[0]
        chunk = free[count]
        free[0] = count - 1
        older[chunk] = newest[slot]
        newest[slot] = chunk
        at = np.int64(chunk) * CHUNK
    for word in range(8):  # word by word: a view of a row costs a reference count
        store[at, word] = rows[place, word]
    fills[slot] = at + 1


@njit(cache=True, _nrt=False)
def begin(words, origins, store, fills, newest, older, free, per_s, model, slow, nodes):
    """Initialise streams, and put the first step of every node into the slice in which it ends."""
    kind, first, second, shift, trace = model
    slow_count, slow_share, slow_factor, transient = slow
    reals = words.view(np.float64)
    whole = words.view(np.int64)
    for node in range(nodes):
        words[0, DURATIONS] = begin_stream(origins[0], node)
        words[0, SAMPLES] = begin_stream(origins[1], node)
        whole[0, WHO] = np.int64(node) << NODE_SHIFT
        seconds = step_seconds(
            0, node, words, kind, first, second, shift, trace, slow_count, slow_share, slow_factor, transient
        )
        reals[0, AT] = seconds
        append(words, 0, (int(seconds * per_s) >> PART_BITS) & (SLICES - 1), store, fills, newest, older, free)


@njit(cache=True, _nrt=False)
def link(place, reals, behind, head, start_s, per_bucket):
    """Put a row of the current part into its bucket; buckets are ordered by time."""
    bucket = min(max(int((reals[place, AT] - start_s) * per_bucket), 0), head.size - 1)
    behind[place] = head[bucket]
    head[bucket] = place


@njit(cache=True, _nrt=False)
def length(slot, fills, newest, older):
    """Rows of a slice or part."""
    chunk = newest[slot]
    if chunk < 0:
        return 0
    count = (fills[slot] - 1) % CHUNK + 1
    while older[chunk] >= 0:
        chunk = older[chunk]
        count += CHUNK
    return count


@njit(cache=True, _nrt=False)
def split(number, store, fills, newest, older, free, per_s):
    """Move the rows of a slice to its parts; those of later cycles return to the slice."""
    slot = number & (SLICES - 1)
    chunk = newest[slot]
    stop = fills[slot]
    newest[slot] = -1
    fills[slot] = 0
    stored = store.view(np.float64)
    while chunk >= 0:
        first = np.int64(chunk) * CHUNK
        stop = first + (stop - 1) % CHUNK + 1
        for at in range(first, stop):
            part = int(stored[at, AT] * per_s)
            target = slot
            if part >> PART_BITS == number:
                target = SLICES + (part & (PARTS - 1))
            append(store, at, target, store, fills, newest, older, free)
        following = older[chunk]
        free[0] += 1
        free[free[0]] = chunk
        chunk = following
        stop = 0


@njit(cache=True, _nrt=False)
def load(part, line, behind, head, store, fills, newest, older, free, per_s, per_bucket):
    """Move the rows of a part into `line` and its buckets."""
    slot = SLICES + (part & (PARTS - 1))
    chunk = newest[slot]
    stop = fills[slot]
    newest[slot] = -1
    fills[slot] = 0
    reals = line.view(np.float64)
    start_s = part / per_s
    loaded = 0
    while chunk >= 0:
        first = np.int64(chunk) * CHUNK
        stop = first + (stop - 1) % CHUNK + 1
        for at in range(first, stop):
            for word in range(8):
                line[loaded, word] = store[at, word]
            link(loaded, reals, behind, head, start_s, per_bucket)
            loaded += 1
        free[0] += 1
        free[free[0]] = chunk
        chunk = older[chunk]
        stop = 0


@njit(cache=True, _nrt=False)
def advance(
    budget,
    scalars,
    line,
    behind,
    head,
    store,
    fills,
    newest,
    older,
    free,
    levels,
    chances,
    duration_s,
    model,
    slow,
    lag,
    queried,
    repoll_s,
    moments_s,
    kept,
    traces,
    totals,
    squares,
    per_s,
    per_bucket,
):
    """Run for `budget` completions; returns `CONTINUE`, `ENDED`, or `LONGER` with the rows needed in `scalars`."""
    kind, first, second, shift, trace = model
    slow_count, slow_share, slow_factor, transient = slow
    trace_s, trace_node, gaps = traces
    whole = line.view(np.int64)
    reals = line.view(np.float64)
    keep_trace = trace_s.size > 1
    last = int(duration_s * per_s)
    part, lowest, bucket, moment, loaded = (
        scalars[PART],
        scalars[LOWEST],
        scalars[BUCKET],
        scalars[MOMENT],
        scalars[LOADED],
    )
    last_update = totals[UPDATES] + budget
    answer = CONTINUE

    while totals[UPDATES] < last_update:
        if not loaded:
            if part > last:
                answer = ENDED
                break
            if part & (PARTS - 1) == 0 and scalars[NEEDED] == 0:
                split(part >> PART_BITS, store, fills, newest, older, free, per_s)
            scalars[NEEDED] = length(SLICES + (part & (PARTS - 1)), fills, newest, older)
            if scalars[NEEDED] > line.shape[0]:
                answer = LONGER
                break
            load(part, line, behind, head, store, fills, newest, older, free, per_s, per_bucket)
            scalars[NEEDED] = 0
            loaded = 1
            bucket = 0
        while bucket < head.size and head[bucket] < 0:
            bucket += 1
        if bucket == head.size:
            loaded = 0
            part += 1
            continue
        before = best = best_before = -1
        place = head[bucket]
        while place >= 0:
            if (
                best < 0
                or reals[place, AT] < reals[best, AT]
                or (reals[place, AT] == reals[best, AT] and whole[place, WHO] < whole[best, WHO])
            ):
                best, best_before = place, before
            before = place
            place = behind[place]
        now = reals[best, AT]
        if now > duration_s:
            answer = ENDED
            break
        while moment < moments_s.size and moments_s[moment] < now:
            keep_levels(kept, moment, levels, lowest)
            moment += 1
        if best_before < 0:
            head[bucket] = behind[best]
        else:
            behind[best_before] = behind[best]

        step = whole[best, WHO] & STEP_MASK
        node = whole[best, WHO] >> NODE_SHIFT
        if whole[best, BLOCKED] == 0:
            whole[best, WHO] += 1
            step += 1
            note_completion(best, node, now, reals, totals, trace_s, trace_node, keep_trace)
            lowest = raised(levels, step, lowest)
        totals[TESTS] += 1
        totals[QUERIES] += queried
        laggards = count_below(levels, lowest, step - lag)
        if uniform(line, best, SAMPLES) < chances[laggards]:
            record_pass(best, now, whole, reals, totals, squares, gaps, keep_trace)
            due = now + step_seconds(
                best, node, line, kind, first, second, shift, trace, slow_count, slow_share, slow_factor, transient
            )
        else:
            whole[best, BLOCKED] = 1
            due = now + repoll_s
        reals[best, AT] = due
        following = int(due * per_s)
        if following == part:
            link(best, reals, behind, head, part / per_s, per_bucket)
        elif following >> PART_BITS == part >> PART_BITS:
            append(line, best, SLICES + (following & (PARTS - 1)), store, fills, newest, older, free)
        else:
            append(line, best, (following >> PART_BITS) & (SLICES - 1), store, fills, newest, older, free)

    if answer == ENDED:
        while moment < moments_s.size:
            keep_levels(kept, moment, levels, lowest)
            moment += 1
    scalars[PART], scalars[LOWEST], scalars[BUCKET], scalars[MOMENT], scalars[LOADED] = (
        part,
        lowest,
        bucket,
        moment,
        loaded,
    )
    return answer


@njit(cache=True, _nrt=False)
def collect(scalars, line, behind, head, store, fills, newest, older, duration_s, steps, waited_s):
    """Collect completed steps and seconds waited per node from all rows."""
    if scalars[LOADED]:
        for bucket in range(scalars[BUCKET], head.size):
            place = head[bucket]
            while place >= 0:
                collect_row(line[place], duration_s, steps, waited_s)
                place = behind[place]
    for slot in range(fills.size):
        chunk = newest[slot]
        stop = fills[slot]
        while chunk >= 0:
            first = np.int64(chunk) * CHUNK
            stop = first + (stop - 1) % CHUNK + 1
            for at in range(first, stop):
                collect_row(store[at], duration_s, steps, waited_s)
            chunk = older[chunk]
            stop = 0


@njit(cache=True, _nrt=False)
def collect_row(row, duration_s, steps, waited_s):
    """Collect one node."""
    whole = row.view(np.int64)
    reals = row.view(np.float64)
    node = whole[WHO] >> NODE_SHIFT
    steps[node] = whole[WHO] & STEP_MASK
    waited_s[node] = reals[WAITED]
    if whole[BLOCKED]:
        waited_s[node] += duration_s - reals[COMPLETED]


@njit(cache=True, _nrt=False)
def keep_levels(kept, place, levels, lowest):
    """`kernel_parts.keep_moment`, computed from the number of nodes per number of steps."""
    nodes = total = 0
    squares = 0.0
    most = lowest
    for level in range(lowest, levels.size):
        if levels[level]:
            nodes += levels[level]
            total += levels[level] * level
            squares += float(levels[level]) * level * level
            most = level
    mean = total / nodes
    kept[place, 0] = mean
    kept[place, 1] = math.sqrt(max(0.0, squares / nodes - mean * mean))
    kept[place, 2] = lowest
    kept[place, 3] = most
