"""The compiled engine's kernel: the history of the reference engine, for large swarms, in machine code by numba.

Imported only when an engine runs, because numba is optional. `swarm` and `rules` are the `Swarm` and the `Rules` of
`compiled`. Not supported: churn, message delay, biased samplers and custom barriers. A node has at most one pending
event, so a binary heap of nodes, by time and then by number, is the queue. Streams are consumed exactly as
`model.samplers` and `model.step_times` do: tests compare whole histories event by event, and the barrier with
`training.barriers.predicates`.
"""
# mypy cannot type these functions; numba does.
# `_nrt=False`: functions that create no array need no reference counts, which took half of the time. Same histories.
# mypy: ignore-errors

from __future__ import annotations

import math

import numpy as np
from numba import njit

from p2pnode.training.simulation.random_streams import DURATIONS, GAMMA, MIX_1, MIX_2, POOLS, SAMPLES
from p2pnode.training.simulation.samplers import REJECTION

_GAMMA, _MIX_1, _MIX_2 = np.uint64(GAMMA), np.uint64(MIX_1), np.uint64(MIX_2)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)

#: Kinds of step times, in the order of `step_times.PARAMETERS`.
CONSTANT, EXP, GAMMA_KIND, LOGNORMAL, TRACE = range(5)
#: Places in `swarm.totals`: four sums of the outcome, then the lowest step, and the lengths of two lists.
UPDATES, PASSES, TESTS, QUERIES, GAPS, LOWEST, BLOCKED, PENDING = range(8)


# -- streams and step times -------------------------------------------------------------------------------------------


@njit(cache=True, _nrt=False)
def uniform(streams, node, purpose):
    streams[node, purpose] += _GAMMA
    value = streams[node, purpose]
    value = (value ^ (value >> _S30)) * _MIX_1
    value = (value ^ (value >> _S27)) * _MIX_2
    return ((value ^ (value >> _S31)) >> _S11) * 2.0**-53


@njit(cache=True, _nrt=False)
def normal(streams, node):
    radius = math.sqrt(-2.0 * math.log(1.0 - uniform(streams, node, DURATIONS)))
    return radius * math.cos(2.0 * math.pi * uniform(streams, node, DURATIONS))


@njit(cache=True, _nrt=False)
def gamma(streams, node, shape):
    boost = 1.0
    if shape < 1.0:
        boost = (1.0 - uniform(streams, node, DURATIONS)) ** (1.0 / shape)
        shape += 1.0
    third = shape - 1.0 / 3.0
    factor = 1.0 / math.sqrt(9.0 * third)
    while True:
        drawn = normal(streams, node)
        cube = 1.0 + factor * drawn
        if cube <= 0.0:
            continue
        cube = cube * cube * cube
        chance = math.log(1.0 - uniform(streams, node, DURATIONS))
        if chance < 0.5 * drawn * drawn + third - third * cube + third * math.log(cube):
            return boost * third * cube


@njit(cache=True, _nrt=False, inline="always")
def step_seconds(streams, node, rules):
    """Seconds of the node's next step."""
    if rules.kind == EXP:
        seconds = rules.shift_s + rules.first * -math.log(1.0 - uniform(streams, node, DURATIONS))
    elif rules.kind == GAMMA_KIND:
        seconds = rules.shift_s + rules.second * gamma(streams, node, rules.first)
    elif rules.kind == LOGNORMAL:
        seconds = rules.shift_s + math.exp(rules.first + rules.second * normal(streams, node))
    elif rules.kind == TRACE:
        seconds = rules.shift_s + rules.trace_s[int(uniform(streams, node, DURATIONS) * rules.trace_s.size)]
    else:
        seconds = rules.shift_s + rules.first
    is_slow = uniform(streams, node, DURATIONS) < rules.slow_share if rules.transient else node < rules.slow_count
    return seconds * rules.slow_factor if is_slow else seconds


# -- the queue --------------------------------------------------------------------------------------------------------


@njit(cache=True, _nrt=False)
def is_before(at_s, one, other):
    return at_s[one] < at_s[other] or (at_s[one] == at_s[other] and one < other)


@njit(cache=True, _nrt=False)
def push(heap, at_s, totals, node, when_s):
    """Put the node's event into the queue."""
    at_s[node] = when_s
    place = totals[PENDING]
    totals[PENDING] += 1
    while place > 0 and is_before(at_s, node, heap[(place - 1) // 2]):
        heap[place] = heap[(place - 1) // 2]
        place = (place - 1) // 2
    heap[place] = node


@njit(cache=True, _nrt=False)
def pop(heap, at_s, totals):
    """Take the node of the earliest event from the queue, which is not empty."""
    first = heap[0]
    totals[PENDING] -= 1
    size = totals[PENDING]
    last = heap[size]
    place = 0
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and is_before(at_s, heap[child + 1], heap[child]):
            child += 1
        if is_before(at_s, last, heap[child]):
            break
        heap[place] = heap[child]
        place = child
    heap[place] = last
    return first


# -- the barrier and its samples --------------------------------------------------------------------------------------


@njit(cache=True, _nrt=False)
def most_laggards(count, quantile):
    """How many of `count` may lag if the quantile is to pass: `training.barriers.predicates.quantile_of`."""
    if quantile >= 1.0:
        return 0
    return count - math.ceil(quantile * count - 1e-9)


@njit(cache=True, _nrt=False, inline="always")
def passes(mine, steps, others, lag, quantile):
    """`quantile_of(ssp …, quantile)` for the steps of `others`; the tests compare it with the shared predicates."""
    allowed = most_laggards(len(others), quantile)
    for other in others:
        if mine - steps[other] > lag:
            if not allowed:
                return False
            allowed -= 1
    return True


@njit(cache=True, _nrt=False, inline="always")
def draw(node, swarm, rules, least, drawn):
    """Draw as many distinct peers into `drawn` as the node samples; returns their number.

    The draw ends with the first peer that has fewer than `least` steps, as it does in the reference engine.
    """
    streams, steps, pool, order, swaps = swarm.streams, swarm.steps, swarm.pool, swarm.order, swarm.swaps
    count, pooled = swarm.beta[node], rules.pooled
    total = pool.shape[1] if pooled else steps.size
    barred = -1 if rules.self_sampled or pooled else node
    shuffled = count * REJECTION > total
    found = tried = 0
    ended = False
    while found < count and not ended and not (shuffled and tried == total):
        if shuffled:
            other = tried + int(uniform(streams, node, SAMPLES) * (total - tried))
            swaps[tried] = other
            order[tried], order[other] = order[other], order[tried]
            peer = order[tried]
            tried += 1
        else:
            peer = int(uniform(streams, node, SAMPLES) * total)
        if pooled:
            peer = pool[node, peer]
        known = peer == barred
        for place in range(found):
            known |= drawn[place] == peer
        if not known:
            drawn[found] = peer
            found += 1
            ended = steps[peer] < least
    # `order` is the identity before and after.
    for place in range(tried - 1, -1, -1):
        other = swaps[place]
        order[place], order[other] = order[other], order[place]
    return found


@njit(cache=True, _nrt=False)
def find(streams, node):
    """Draw a peer for the pool of a node."""
    while True:
        peer = int(uniform(streams, node, POOLS) * streams.shape[0])
        if peer != node:
            return peer


@njit(cache=True, _nrt=False, inline="always")
def renew(node, now, swarm, every_s):
    """Replace the entries of a node's pool that are due."""
    size = swarm.pool.shape[1]
    due = int((now - swarm.renewed_s[node]) / every_s)
    if due > 0:
        swarm.renewed_s[node] += due * every_s
        for _ in range(min(due, size)):
            swarm.pool[node, swarm.oldest[node]] = find(swarm.streams, node)
            swarm.oldest[node] = (swarm.oldest[node] + 1) % size


@njit(cache=True, _nrt=False, inline="always")
def is_free(node, now, swarm, rules):
    """Whether the node passes its barrier now."""
    steps = swarm.steps
    mine = steps[node]
    if not rules.samples:
        return True
    if rules.complete:
        behind = 0
        for level in range(swarm.totals[LOWEST], mine - rules.lag):
            behind += swarm.levels[level]
        return behind <= most_laggards(steps.size - 1, rules.quantile)
    if rules.holds:
        return passes(mine, steps, swarm.held[node, : swarm.held_count[node]], rules.lag, rules.quantile)
    if rules.pooled:
        renew(node, now, swarm, rules.every_s)
    least = mine - rules.lag if rules.quantile >= 1.0 else 0
    count = draw(node, swarm, rules, least, swarm.drawn)
    return passes(mine, steps, swarm.drawn[:count], rules.lag, rules.quantile)


# -- the loop ---------------------------------------------------------------------------------------------------------


@njit(cache=True, _nrt=False)
def begin(swarm, rules):
    """Fill the pools, and begin the first step of every node."""
    for node in range(swarm.steps.size):
        if rules.pooled:
            for place in range(swarm.pool.shape[1]):
                swarm.pool[node, place] = find(swarm.streams, node)
        push(swarm.heap, swarm.at_s, swarm.totals, node, step_seconds(swarm.streams, node, rules))


@njit(cache=True, _nrt=False, inline="always")
def complete(node, now, swarm, rules):
    """Count the step that the node has completed; whether the lowest step of the swarm has risen with it."""
    totals, levels, step = swarm.totals, swarm.levels, swarm.steps[node] + 1
    swarm.steps[node] = step
    swarm.completed_s[node] = now
    if swarm.trace_s.size:
        swarm.trace_s[totals[UPDATES]] = now
        swarm.trace_node[totals[UPDATES]] = node
    totals[UPDATES] += 1
    before = totals[LOWEST]
    if rules.complete:
        levels[step - 1] -= 1
        levels[step] += 1
        while levels[totals[LOWEST]] == 0:
            totals[LOWEST] += 1
    elif rules.holds:
        swarm.held_count[node] = draw(node, swarm, rules, 0, swarm.held[node])
    return totals[LOWEST] > before


@njit(cache=True, _nrt=False, inline="always")
def record_pass(node, now, swarm):
    totals = swarm.totals
    swarm.waited_s[node] += now - swarm.completed_s[node]
    gap = totals[UPDATES] - swarm.last_pass[node]
    swarm.last_pass[node] = totals[UPDATES]
    totals[GAPS] += gap
    swarm.gap_squares[0] += float(gap) * gap
    if swarm.gaps.size:
        swarm.gaps[totals[PASSES]] = gap
    totals[PASSES] += 1


@njit(cache=True, _nrt=False)
def advance(until_s, room, swarm, rules):
    """Handle the events up to `until_s`, at most `room` completions; whether all have been handled.

    Arrays that grow are extended between two calls.
    """
    totals, heap, at_s, queue = swarm.totals, swarm.heap, swarm.at_s, swarm.queue
    peers = swarm.steps.size - 1
    last_update = totals[UPDATES] + room
    while totals[PENDING] > 0 and at_s[heap[0]] <= until_s:
        if totals[UPDATES] == last_update:
            return False
        node = pop(heap, at_s, totals)
        now = at_s[node]
        rose = complete(node, now, swarm, rules) if not swarm.is_blocked[node] else False
        swarm.is_blocked[node] = True

        # Who tests its barrier: the node alone, or everyone that has been blocked, in that order.
        queue[totals[BLOCKED]] = node
        queued = totals[BLOCKED] + 1
        if rules.samples and rules.tests_once:
            totals[TESTS] += 1
            totals[QUERIES] += peers if rules.complete else swarm.held_count[node]
        elif rules.samples:
            totals[TESTS] += queued
            for place in range(queued):
                asked = peers if rules.complete else min(swarm.beta[queue[place]], peers + rules.self_sampled)
                totals[QUERIES] += asked
        # While the lowest step stays the same, only the newly blocked node can pass a complete barrier.
        left = queued - 1 if rules.complete and rules.quantile >= 1.0 and not rose else 0
        for place in range(left, queued):
            waiting = queue[place]
            if is_free(waiting, now, swarm, rules):
                swarm.is_blocked[waiting] = False
                record_pass(waiting, now, swarm)
                push(heap, at_s, totals, waiting, now + step_seconds(swarm.streams, waiting, rules))
            elif rules.is_notified:
                queue[left] = waiting
                left += 1
            else:
                push(heap, at_s, totals, waiting, now + rules.repoll_s)
        totals[BLOCKED] = left
    return True
