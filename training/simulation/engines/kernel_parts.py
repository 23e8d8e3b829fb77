"""Parts of the compiled kernels: streams, step times, barrier arithmetic, samples, and the event queue.

The state of a node occupies one cache line: row `node` of `words`, a uint64[nodes, 8]. `reals` and `whole` are views of
it as float64 and int64. With a million nodes memory access dominates, and an event touches one line.

Pending events are in a calendar queue (R. Brown, CACM 31 (1988) 1220); each node has exactly one. Samples and step
times consume their streams exactly as `model.samplers` and `model.step_times` do.
"""
# mypy cannot type these functions; numba does.
# mypy: ignore-errors

from __future__ import annotations

import math

import numpy as np
from numba import njit

from p2pnode.training.simulation.model.random_streams import GAMMA, MIX_1, MIX_2
from p2pnode.training.simulation.model.samplers import REJECTION

_GAMMA, _MIX_1, _MIX_2 = np.uint64(GAMMA), np.uint64(MIX_1), np.uint64(MIX_2)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)
_UNIT = 2.0**-53

#: Columns of a node's row. `AT` is the time of its event, `NEXT` the next node in its bucket.
AT, COMPLETED, WAITED, LAST_PASS, NEXT, DURATIONS, SAMPLES, BLOCKED = range(8)
#: Kinds of step times, in the order of `step_times.PARAMETERS`.
CONSTANT, EXP, GAMMA_KIND, LOGNORMAL, TRACE = range(5)


# -- streams and step times -------------------------------------------------------------------------------------------


@njit(cache=True, inline="always")
def mixed(value):
    value = (value ^ (value >> _S30)) * _MIX_1
    value = (value ^ (value >> _S27)) * _MIX_2
    return value ^ (value >> _S31)


@njit(cache=True, inline="always")
def uniform(words, node, column):
    words[node, column] += _GAMMA
    return (mixed(words[node, column]) >> _S11) * _UNIT


@njit(cache=True, inline="always")
def begin_stream(origin, node):
    """The initial state of a node's stream."""
    return mixed(np.uint64(origin) + np.uint64(node + 1) * _GAMMA)


@njit(cache=True)
def begin_streams(words, column, origin):
    """Set the stream of every row to its initial state."""
    for node in range(words.shape[0]):
        words[node, column] = begin_stream(origin, node)


@njit(cache=True)
def normal(words, node):
    radius = math.sqrt(-2.0 * math.log(1.0 - uniform(words, node, DURATIONS)))
    return radius * math.cos(2.0 * math.pi * uniform(words, node, DURATIONS))


@njit(cache=True)
def gamma(words, node, shape):
    boost = 1.0
    if shape < 1.0:
        boost = (1.0 - uniform(words, node, DURATIONS)) ** (1.0 / shape)
        shape += 1.0
    third = shape - 1.0 / 3.0
    factor = 1.0 / math.sqrt(9.0 * third)
    while True:
        drawn = normal(words, node)
        cube = 1.0 + factor * drawn
        if cube <= 0.0:
            continue
        cube = cube * cube * cube
        chance = math.log(1.0 - uniform(words, node, DURATIONS))
        if chance < 0.5 * drawn * drawn + third - third * cube + third * math.log(cube):
            return boost * third * cube


@njit(cache=True)
def step_seconds(row, node, words, kind, first, second, shift, trace, slow_count, slow_share, slow_factor, transient):
    """Seconds of one step, from the stream in a row. Plain arguments: a tuple of arrays costs reference counts."""
    if kind == EXP:
        seconds = shift + first * -math.log(1.0 - uniform(words, row, DURATIONS))
    elif kind == GAMMA_KIND:
        seconds = shift + second * gamma(words, row, first)
    elif kind == LOGNORMAL:
        seconds = shift + math.exp(first + second * normal(words, row))
    elif kind == TRACE:
        seconds = shift + trace[int(uniform(words, row, DURATIONS) * trace.size)]
    else:
        seconds = shift + first
    if transient:
        if uniform(words, row, DURATIONS) < slow_share:
            seconds *= slow_factor
    elif node < slow_count:
        seconds *= slow_factor
    return seconds


# -- the barrier ------------------------------------------------------------------------------------------------------


@njit(cache=True, inline="always")
def laggard(mine, other, lag):
    """`not ssp(mine, [other], lag)`."""
    return mine - other > lag


@njit(cache=True)
def most_laggards(count, quantile):
    """How many of `count` may lag if the quantile is to pass: `training.barriers.predicates.quantile_of`."""
    if quantile >= 1.0:
        return 0
    return count - math.ceil(quantile * count - 1e-9)


@njit(cache=True)
def passes(mine, others, lag, quantile):
    """`quantile_of(ssp …, quantile)` on an array; the tests compare it with the shared predicates."""
    behind = 0
    for other in others:
        if laggard(mine, other, lag):
            behind += 1
    return behind <= most_laggards(len(others), quantile)


@njit(cache=True)
def count_below(levels, lowest, limit):
    """Nodes with fewer than `limit` completed steps; `levels` counts the nodes per number of steps."""
    count = 0
    for level in range(lowest, min(limit, levels.size)):
        count += levels[level]
    return count


# -- samples ----------------------------------------------------------------------------------------------------------


@njit(cache=True, inline="always")
def distinct(values, count):
    """Move the first occurrence of each value to the front, in order; returns their number."""
    kept = 1
    for place in range(1, count):
        known = False
        for other in range(kept):
            known |= values[other] == values[place]
        values[kept] = values[place]
        kept += not known
    return min(kept, count)


@njit(cache=True)
def sample_passes(node, words, steps, lag, quantile, beta, barred, pool, pooled, drawn, order, swaps):
    """Draw up to `beta` distinct peers other than `barred`, and test them; stops early as the reference engine does.

    Draws from the node's row of `pool` if `pooled`, else from all nodes. `order` is the identity before and after.
    """
    total = pool.shape[1] if pooled else steps.size
    mine = steps[node]
    count = behind = 0
    if beta * REJECTION <= total:
        while True:
            while count < beta:
                peer = int(uniform(words, node, SAMPLES) * total)
                if pooled:
                    peer = pool[node, peer]
                if peer == barred:
                    continue
                if quantile >= 1.0 and laggard(mine, steps[peer], lag):
                    return False
                drawn[count] = peer
                count += 1
            # Repetitions are rare and change no result before the last draw, so they are removed at the end.
            count = distinct(drawn, count)
            if count == beta:
                break
        if quantile < 1.0:
            for place in range(count):
                behind += laggard(mine, steps[drawn[place]], lag)
        return behind <= most_laggards(count, quantile)
    result = True
    done = 0
    while done < total and count < beta:
        other = done + int(uniform(words, node, SAMPLES) * (total - done))
        swaps[done] = other
        order[done], order[other] = order[other], order[done]
        peer = order[done]
        done += 1
        if pooled:
            peer = pool[node, peer]
        known = peer == barred
        if pooled:
            for place in range(count):
                known |= drawn[place] == peer
        if known:
            continue
        drawn[count] = peer
        count += 1
        if laggard(mine, steps[peer], lag):
            behind += 1
            if quantile >= 1.0:
                result = False
                break
    for place in range(done - 1, -1, -1):
        other = swaps[place]
        order[place], order[other] = order[other], order[place]
    return result and behind <= most_laggards(count, quantile)


@njit(cache=True)
def draw_all(node, words, beta, barred, total, drawn, order, swaps):
    """As `sample_passes`, without the test: draws the sample that a node holds; returns its size."""
    count = 0
    if beta * REJECTION <= total:
        while count < beta:
            peer = int(uniform(words, node, SAMPLES) * total)
            known = peer == barred
            for place in range(count):
                known |= drawn[place] == peer
            if not known:
                drawn[count] = peer
                count += 1
        return count
    done = 0
    while done < total and count < beta:
        other = done + int(uniform(words, node, SAMPLES) * (total - done))
        swaps[done] = other
        order[done], order[other] = order[other], order[done]
        peer = order[done]
        done += 1
        if peer != barred:
            drawn[count] = peer
            count += 1
    for place in range(done - 1, -1, -1):
        other = swaps[place]
        order[place], order[other] = order[other], order[place]
    return count


@njit(cache=True)
def find(node, nodes, finding):
    """Draw a peer for the pool of a node."""
    while True:
        peer = int(uniform(finding, node, 0) * nodes)
        if peer != node:
            return peer


@njit(cache=True)
def renew(node, now, every_s, pool, oldest, renewed_s, finding, nodes):
    """Replace the entries of a node's pool that are due."""
    size = pool.shape[1]
    due = int((now - renewed_s[node]) / every_s)
    if due > 0:
        renewed_s[node] += due * every_s
        for _ in range(min(due, size)):
            pool[node, oldest[node]] = find(node, nodes, finding)
            oldest[node] = (oldest[node] + 1) % size


# -- the queue --------------------------------------------------------------------------------------------------------


@njit(cache=True, inline="always")
def insert(node, moment, whole, reals, head, per_s):
    """Put a node's event into the bucket of its time; buckets repeat cyclically, as the days of a year do."""
    reals[node, AT] = moment
    bucket = int(moment * per_s) & (head.size - 1)
    whole[node, NEXT] = head[bucket]
    head[bucket] = node


@njit(cache=True)
def pop(day, last_day, whole, reals, head, per_s):
    """The node of the earliest event and its day; −1 if there is none until the last day."""
    mask = head.size - 1
    while day <= last_day:
        bucket = day & mask
        best = -1
        before_best = before = -1
        node = head[bucket]
        while node >= 0:
            at = reals[node, AT]
            if int(at * per_s) == day and (best < 0 or at < reals[best, AT] or (at == reals[best, AT] and node < best)):
                best, before_best = node, before
            before = node
            node = whole[node, NEXT]
        if best >= 0:
            if before_best < 0:
                head[bucket] = whole[best, NEXT]
            else:
                whole[before_best, NEXT] = whole[best, NEXT]
            return best, day
        day += 1
    return -1, day


# -- recording --------------------------------------------------------------------------------------------------------


@njit(cache=True)
def keep_moment(kept, place, steps):
    """Mean, standard deviation, least and most."""
    total = 0.0
    squares = 0.0
    least = most = steps[0]
    for value in steps:
        total += value
        squares += float(value) * value
        least = min(least, value)
        most = max(most, value)
    mean = total / steps.size
    kept[place, 0] = mean
    kept[place, 1] = math.sqrt(max(0.0, squares / steps.size - mean * mean))
    kept[place, 2] = least
    kept[place, 3] = most
