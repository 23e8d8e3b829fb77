"""The error of the population estimate, whether its interval keeps its word, and how it follows.

The estimator on many sets of random ids, each asked by lookups that return the true 20 closest. Then a simulated swarm
of real overlay code, of which half crashes at one moment.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from dataclasses import dataclass

import numpy as np

from p2pnode.overlay.discovery.population import Estimator
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.swarms.overlay_swarm import OverlayWorld

LOOKUPS = 16
K = 20
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


def halve(seed: int, nodes: int, asked_s: tuple[float, ...]) -> dict[float, list[float]]:
    """The errors of all running nodes' estimates, by the time since half of the swarm crashed."""

    async def story() -> dict[float, list[float]]:
        world = OverlayWorld(seed, recording=False)
        await world.raise_swarm(nodes, bootstraps=3)
        await asyncio.sleep(120)
        victims = random.Random(f"{seed}/halve").sample(sorted(world.nodes), nodes // 2)
        await asyncio.gather(*(world.kill(number) for number in victims))
        died = world.clock.monotonic()
        errors: dict[float, list[float]] = {}
        for after_s in asked_s:
            await asyncio.sleep(died + after_s - world.clock.monotonic())
            living = world.nodes.values()
            errors[after_s] = [node.population().estimate / len(living) - 1 for node in living]
        await world.stop()
        return errors

    return VirtualLoop().run(story())
