"""exchange_history: what a step costs a node of 50, 150 and 300 with 256 shards, crashes and losses; what it conserves.

Real exchanges on a simulated network, in virtual time, in one process each (tests/harness/histories/large_history.py):
every node trains 50 steps of a million values, a tenth of them is killed, and 2 % of the messages are lost. At the end
each acknowledged delta has to be once in the owner's value and in its backup's, and every replica has to be the owners'
values; a history in which it is not ends the benchmark. Processor time is that of the process between the first step
and the last: all nodes, the simulated network, and the counting.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from benchmarks.record import NotMeasured, Outcome, Series
from tests.harness.histories.delta_ledger import Broken
from tests.harness.histories.large_history import play_large
from tests.harness.histories.large_plan import LargePlan, LargeTally

SIZES = (50, 150, 300)
STEPS = 50


def measure(arguments: argparse.Namespace) -> Outcome:
    sizes = (arguments.nodes,) if arguments.nodes else SIZES
    seeds = (arguments.seed,) if arguments.seed else range(1, 1 + (arguments.repetitions or 1))
    plans = [LargePlan(nodes=nodes, steps=arguments.steps or STEPS) for nodes in sizes]
    return outcome(plans, [[_played(seed, plan) for seed in seeds] for plan in plans])


def _played(seed: int, plan: LargePlan) -> LargeTally:
    """In a process of its own, whose memory is that of the history."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(play_large, seed, plan).result()
        except Broken as error:
            raise NotMeasured(f"{plan.nodes} nodes: {error}") from error


def outcome(plans: Sequence[LargePlan], found: Sequence[Sequence[LargeTally]]) -> Outcome:
    """The figures of these histories: for each size one or more, by seed."""
    plan = plans[0]
    values = plan.shards * plan.values_per_shard
    conditions = (
        f"real exchanges on a simulated network, one process: each node trains {plan.steps} steps of "
        f"{values / 1e6:.2g} M values in {plan.shards} shards of {4 * plan.values_per_shard / 1024:g} KiB, "
        f"pushed and pulled in bfloat16, at a barrier pssp; 1 to 20 ms one way, {plan.loss:.0%} of requests and "
        f"of answers lost; {plan.crash:.0%} of the nodes killed, half of those started again; every history "
        f"conserves all that was acknowledged, or it is not measured; one seed per repetition"
    )
    series = []
    for size, tallies in zip(plans, found, strict=True):
        at = f"{size.nodes} nodes, {size.shards} shards"
        times = [tally.processor_ms_per_step for tally in tallies]
        details = {"tallies": [vars(tally) for tally in tallies]}
        series += [
            Series(f"{at}: processor time of a node per step", "ms", times, "", details),
            Series(f"{at}: requests of a node per step", "", [tally.requests_per_step for tally in tallies]),
            Series(f"{at}: longest wait for an answer or a value", "virtual s", [one.longest_s for one in tallies]),
            Series(f"{at}: memory of the process", "GB", [tally.peak_bytes / 1e9 for tally in tallies]),
        ]
    if len(plans) > 1:
        few, many = found[0], found[-1]
        times = [
            large.processor_ms_per_step / small.processor_ms_per_step for small, large in zip(few, many, strict=True)
        ]
        ratio = plans[-1].nodes / plan.nodes
        name = f"processor time of a node per step, {plans[-1].nodes} nodes over {plan.nodes}"
        series.append(Series(name, "times", times, f"≤ {ratio:g}"))
    return Outcome("exchange_history", conditions, series)
