"""overlay_population: the error of the population estimate, whether its interval keeps its word, and how it follows.

The estimator on many sets of random ids, each asked by lookups that return the true 20 closest. Then a simulated swarm
of real overlay code, of which half crashes at one moment.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
from dataclasses import dataclass

import numpy as np

from benchmarks.record import Outcome, Series
from p2pnode.overlay.discovery.population import Estimator
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.swarms.overlay_swarm import OverlayWorld

SIZES = (50, 200, 1000)
LOOKUPS = 16
TRIALS = 2000
K = 20
REPETITIONS = 3
#: The swarm of which half crashes, and when it is asked how many are left.
NODES = 200
ASKED_S = (30.0, 60.0, 120.0)
_ID_BITS = 62


@dataclass(frozen=True)
class Errors:
    """Shares of the true number."""

    bias: float
    spread: float
    covered: float
    zone_bias: float
    zone_spread: float


def estimate_often(seed: int, nodes: int, trials: int, lookups: int = LOOKUPS) -> Errors:
    """Each trial: another set of ids, `lookups` random targets, one estimate."""
    rng = np.random.default_rng([seed, nodes])
    estimates: list[float] = []
    zones: list[float] = []
    covered = 0
    for _ in range(trials):
        node_ids = rng.integers(0, 1 << _ID_BITS, nodes)
        estimator = Estimator(K)
        for _ in range(lookups):
            distances = np.partition(node_ids ^ rng.integers(0, 1 << _ID_BITS), min(K, nodes) - 1)[:K]
            estimator.observe(((distances + 1) / 2.0**_ID_BITS).tolist(), 0.0)
        population = estimator.estimate(0.0)
        assert population is not None
        estimates.append(population.estimate / nodes)
        zones.append((population.zone_estimate or math.nan) / nodes)
        covered += population.low <= nodes <= population.high
    return Errors(
        statistics.mean(estimates) - 1,
        statistics.pstdev(estimates),
        covered / trials,
        statistics.mean(zones) - 1,
        statistics.pstdev(zones),
    )


def theoretical_spread(nodes: int, lookups: int = LOOKUPS) -> float:
    """sqrt((1 - k/n) / (L k - 2)): 5.6 % at k = 20 and 16 lookups of a large swarm."""
    return math.sqrt((1 - K / nodes) / (lookups * K - 2))


def halve(seed: int, nodes: int, asked_s: tuple[float, ...] = ASKED_S) -> dict[float, list[float]]:
    """The errors of all running nodes' estimates, by the time since half of the swarm crashed."""

    async def story() -> dict[float, list[float]]:
        world = OverlayWorld(seed, recording=False)
        await world.raise_swarm(nodes, bootstraps=3)
        await asyncio.sleep(120)
        victims = random.Random(f"{seed}/halve").sample(sorted(world.nodes), nodes // 2)
        await asyncio.gather(*(world.crash(number) for number in victims))
        died = world.clock.monotonic()
        errors: dict[float, list[float]] = {}
        for after_s in asked_s:
            await asyncio.sleep(died + after_s - world.clock.monotonic())
            living = world.nodes.values()
            errors[after_s] = [node.population().estimate / len(living) - 1 for node in living]
        await world.stop()
        return errors

    return VirtualLoop().run(story())


def measure(arguments: argparse.Namespace) -> Outcome:
    repetitions = range(arguments.repetitions or REPETITIONS)
    series: list[Series] = []
    for nodes in SIZES:
        errors = [estimate_often(seed, nodes, TRIALS) for seed in repetitions]
        at = f"{nodes} nodes"
        series += [
            Series(f"{at}: bias of the estimate", "%", [100 * abs(each.bias) for each in errors], "≤ 2"),
            Series(
                f"{at}: spread of the estimate over the theoretical",
                "",
                [each.spread / theoretical_spread(nodes) for each in errors],
            ),
            Series(f"{at}: spread of the estimate", "%", [100 * each.spread for each in errors]),
            Series(f"{at}: truth within the 95 % interval", "%", [100 * each.covered for each in errors], "≥ 93"),
            Series(f"{at}: the same, upper bound", "%", [100 * each.covered for each in errors], "≤ 97"),
            Series(f"{at}: bias of the zone count", "%", [100 * abs(each.zone_bias) for each in errors], "≤ 2"),
            Series(f"{at}: spread of the zone count", "%", [100 * each.zone_spread for each in errors]),
        ]
    halved = [halve(seed, NODES) for seed in repetitions]
    for after_s in ASKED_S:
        series.append(
            Series(
                f"half of {NODES} dead: error of the estimate after {after_s:.0f} s, median of the nodes",
                "%",
                [100 * statistics.median(map(abs, errors[after_s])) for errors in halved],
                "≤ 15" if after_s == ASKED_S[-1] else "",
            )
        )
    last = [sorted(map(abs, errors[ASKED_S[-1]])) for errors in halved]
    series.append(
        Series(
            f"half of {NODES} dead: nodes within 15 % after {ASKED_S[-1]:.0f} s",
            "%",
            [100 * sum(error <= 0.15 for error in errors) / len(errors) for errors in last],
        )
    )
    conditions = (
        f"{LOOKUPS} lookups of k = {K} that return the true closest, {TRIALS} sets of ids per repetition; half dead: "
        f"simulated network, real overlay code, {NODES} nodes, virtual seconds"
    )
    return Outcome("overlay_population", conditions, series)
