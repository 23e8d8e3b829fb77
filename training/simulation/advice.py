"""Recommends barrier, sample size and staleness for a swarm with known step times, by simulating all candidates.

The rule: of the barriers that keep at least `keep` of asp's progress, take the one with the least standard deviation of
completed steps. Among equals take the one with fewer queries.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from p2pnode.training.barriers.predicates import resample_after, sample_size
from p2pnode.training.settings import BarrierSettings
from p2pnode.training.simulation.outcome import summary
from p2pnode.training.simulation.plan import Plan, parse_barrier
from p2pnode.training.simulation.run import simulate
from p2pnode.training.simulation.step_times import StepTimes, Stragglers

#: More nodes change a sampled barrier's progress by less than one percent (`docs/psp.md`), and take longer.
MAX_NODES = 1000
#: A node counts as slow if its median step takes this many times the swarm's.
SLOW_FACTOR = 1.5
#: Steps of the mean node that are simulated.
STEPS = 60
#: The share of asp's progress that a recommended barrier must keep.
KEEP = 0.85


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a swarm: step times of one node, announced medians of all, and the number of workers."""

    trace_s: tuple[float, ...]
    medians_s: tuple[float, ...]
    workers: float

    def model(self) -> tuple[StepTimes, Stragglers]:
        """The node's own step times, scaled to the swarm's median, and the slow nodes with their mean factor."""
        own = statistics.median(self.trace_s)
        medians = [value for value in self.medians_s if value > 0] or [own]
        middle = statistics.median(medians)
        usual = StepTimes("trace", trace_s=tuple(value * middle / own for value in self.trace_s))
        slow = [value / middle for value in medians if value > SLOW_FACTOR * middle]
        if not slow:
            return usual, Stragglers()
        return usual, Stragglers(len(slow) / len(medians), statistics.fmean(slow))


@dataclass(frozen=True, slots=True)
class Prediction:
    """Simulated figures of one barrier: progress as a share of asp's, steps per second, spread, and cost."""

    name: str
    barrier: BarrierSettings
    progress: float
    steps_per_s: float
    spread_steps: float
    inconsistency: float
    queries_per_step: float
    waited_s_per_step: float


@dataclass(frozen=True, slots=True)
class Advice:
    """All candidates, asp first, and the choice; `present` is the barrier that the swarm runs now."""

    predictions: tuple[Prediction, ...]
    choice: Prediction
    nodes: int
    stragglers: Stragglers
    present: Prediction | None


def candidates(workers: float) -> dict[str, BarrierSettings]:
    """asp, bsp, ssp(4), and samples up to the default size, with staleness 0 to 8."""
    largest = max(sample_size(0, workers), 2)
    betas = sorted({beta for beta in (1, 2, 4, largest) if beta < max(2.0, workers - 1)})
    names = ["asp", "bsp", "ssp(4)", *(f"pbsp({beta})" for beta in betas)]
    names += [f"pssp({staleness},{beta})" for staleness in (1, 2, 4, 8) for beta in betas]
    return {name: parse_barrier(name) for name in names}


def advise(
    measured: Measured,
    *,
    seed: int = 1,
    keep: float = KEEP,
    present: BarrierSettings | None = None,
    progress: Callable[[float], None] = lambda _share: None,
) -> Advice:
    """Simulate every candidate on the measured step times. Raises `ValueError` for fewer than two workers."""
    nodes = min(MAX_NODES, round(measured.workers))
    if nodes < 2:
        raise ValueError(f"the swarm has {measured.workers:.0f} worker: a barrier needs two")
    tried = candidates(nodes)
    if present is not None:
        tried["as it runs"] = present
    found: list[Prediction] = []
    for name, barrier in tried.items():
        found.append(_predict(name, barrier, measured, nodes, seed, found))
        progress(len(found) / len(tried))
    own = next((prediction for prediction in found if prediction.name == "as it runs"), None)
    return Advice(tuple(found), choose(found, keep), nodes, measured.model()[1], own)


def choose(predictions: Sequence[Prediction], keep: float) -> Prediction:
    """The rule of this module; asp if no candidate keeps enough."""
    enough = [prediction for prediction in predictions if prediction.progress >= keep]
    enough = [prediction for prediction in enough if prediction.name != "as it runs"] or [predictions[0]]
    return min(enough, key=lambda prediction: (round(prediction.spread_steps, 2), prediction.queries_per_step))


def _predict(
    name: str, barrier: BarrierSettings, measured: Measured, nodes: int, seed: int, before: Sequence[Prediction]
) -> Prediction:
    times, stragglers = measured.model()
    duration_s = STEPS * times.mean_s
    plan = Plan(
        nodes=nodes,
        barrier=barrier,
        duration_s=duration_s,
        steps=times,
        stragglers=stragglers,
        discipline="pool",
        repoll_s=resample_after(times.mean_s),
        seed=seed,
    )
    figures = summary(simulate(plan))
    steps_per_s = figures["mean_steps"] / duration_s
    return Prediction(
        name=name,
        barrier=barrier,
        progress=steps_per_s / before[0].steps_per_s if before else 1.0,
        steps_per_s=steps_per_s,
        spread_steps=figures["sd_steps"],
        inconsistency=figures["progress_inconsistency_sd"],
        queries_per_step=figures["queries_per_step"],
        waited_s_per_step=figures["waited_s_per_step"],
    )
