"""Describes a simulation: the swarm, its barrier, and when a blocked node samples again (its discipline). Pure.

The results depend on the discipline most:

| discipline | what a blocked node does |
|---|---|
| `event` | draws a fresh sample at every completion anywhere |
| `repoll` | draws a fresh sample every `repoll_s` |
| `hold` | keeps its first sample until it passes |
| `pool` | as `repoll`, from a pool of `pool_size` peers that is renewed within `pool_renewal_s`, like the daemon |

Complete barriers (bsp, ssp) look at all nodes, at the same times; for them `hold` means `event`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from p2pnode.overlay.discovery.sampling import BALL_NODES, POOL_AGE_S, POOL_BALLS
from p2pnode.training.barriers.predicates import Barrier, make_barrier
from p2pnode.training.settings import BarrierSettings
from p2pnode.training.simulation.step_times import StepTimes, Stragglers

Discipline = Literal["event", "repoll", "hold", "pool"]
Sampler = Literal["uniform", "biased"]

DISCIPLINES: tuple[Discipline, ...] = ("event", "repoll", "hold", "pool")
SAMPLERS: tuple[Sampler, ...] = ("uniform", "biased")

_NAME = re.compile(r"^(asp|bsp|ssp|pbsp|pssp)(?:\((\d+)(?:,(\d+))?\))?$")


@dataclass(frozen=True, slots=True)
class Churn:
    """Nodes crash at `rate` per node and second. After `rejoin_s` a new node replaces each, at the median step. For
    `detection_s` a crashed node stays in samples, at its last step."""

    rate: float = 0.0
    detection_s: float = 10.0
    rejoin_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One simulated swarm. All seconds are virtual.

    `population_error` is the relative standard deviation of each node's estimate of the population size (log-normal,
    one value per node). The default sample size and the weight 1/N̂ depend on it. `delay_s` is the one-way delay of a
    message. `self_sampled` lets a node sample itself, as the simulator Ninox does (`docs/psp.md`) and the daemon does
    not. The `biased` sampler draws the node closest to a random id. The nodes' parts of the id space are exponentially
    distributed.
    """

    nodes: int
    barrier: BarrierSettings
    duration_s: float
    steps: StepTimes = field(default_factory=lambda: StepTimes("exp", 1.0))
    stragglers: Stragglers = field(default_factory=Stragglers)
    discipline: Discipline = "repoll"
    repoll_s: float = 0.05
    #: The size of the daemon's pool: the peers in its balls, which are neighbourhoods of random ids.
    pool_size: int = round(POOL_BALLS * BALL_NODES)
    pool_renewal_s: float = POOL_AGE_S
    sampler: Sampler = "uniform"
    self_sampled: bool = False
    population_error: float = 0.0
    delay_s: float = 0.0
    churn: Churn = field(default_factory=Churn)
    seed: int = 1

    def __post_init__(self) -> None:
        positive = {
            "nodes": self.nodes,
            "duration_s": self.duration_s,
            "repoll_s": self.repoll_s,
            "pool_size": self.pool_size,
            "pool_renewal_s": self.pool_renewal_s,
        }
        for name, value in positive.items():
            if value <= 0:
                raise ValueError(f"{name} = {value} must be above zero")
        if self.population_error < 0 or self.delay_s < 0 or self.churn.rate < 0 or self.seed < 0:
            raise ValueError("population_error, delay_s, churn and seed cannot be negative")

    def made_barrier(self) -> Barrier:
        """The daemon's barrier with these settings. Raises `BarrierNotFound`."""
        return make_barrier(self.barrier)


def parse_barrier(name: str) -> BarrierSettings:
    """The settings of a name as the literature writes it: `bsp`, `ssp(4)`, `pbsp(10)`, `pssp(4,10)`.

    Of two numbers the first is the staleness. Raises `ValueError`.
    """
    match = _NAME.match(name)
    if match is None:
        raise ValueError(f'"{name}" is not a barrier: write asp, bsp, ssp(4), pbsp(10) or pssp(4,10)')
    method = match[1]
    numbers = [int(number) for number in match.groups()[1:] if number]
    match method:
        case "ssp":
            return BarrierSettings(method=method, staleness=numbers[0] if numbers else 4)
        case "pbsp":
            return BarrierSettings(method=method, sample=numbers[0] if numbers else 0)
        case "pssp":
            staleness, sample = (*numbers, 0, 0)[:2] if numbers else (4, 0)
            return BarrierSettings(method=method, staleness=staleness, sample=sample)
        case _:
            return BarrierSettings(method=method)
