"""Which barrier, sample and staleness for a swarm whose step times are known: try them all, and choose by one rule.

The rule: of the barriers that keep at least `keep` of asp's progress, the one whose nodes lie closest together (least
standard deviation of completed steps); among equals the one that asks less. All but the simulations is pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from training.barriers.predicates import resample_after, sample_size
from training.settings import BarrierSettings
from training.simulation.model.barrier_names import parse_barrier
from training.simulation.model.metrics import summary
from training.simulation.model.plan import Plan
from training.simulation.model.step_times import StepTimes, Stragglers
from training.simulation.run import simulate

#: More nodes change a sampled barrier's progress by less than a percent (`docs/psp.md`), and cost time.
MOST_NODES = 1000
#: A node whose median step takes this many times the swarm's counts as slow.
SLOW_FACTOR = 1.5
#: Steps of the mean node that are simulated.
STEPS = 60
#: Of asp's progress that a recommended barrier keeps.
KEEP = 0.85


@dataclass(frozen=True, slots=True)
class Measured:
    """What a swarm shows of itself: one node's step times, the announced medians of all, and how many work."""

    trace_s: tuple[float, ...]
    medians_s: tuple[float, ...]
    workers: float
    resample_s: float = 0.0

    def model(self) -> tuple[StepTimes, Stragglers]:
        """The node's own steps, scaled to the swarm's median, and the slow nodes as stragglers of their mean factor."""
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
    """What one barrier would do: progress of the mean node as a share of asp's, steps per second, spread, cost."""

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
    """All that was tried, asp first, and the choice; `present` is what the swarm runs now."""

    predictions: tuple[Prediction, ...]
    choice: Prediction
    nodes: int
    stragglers: Stragglers
    present: Prediction | None


def candidates(workers: float) -> dict[str, BarrierSettings]:
    """asp, bsp, ssp(4), and samples up to the default one with staleness 0 to 8."""
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
    """Simulate every candidate on what was measured. Raises `ValueError` without two workers."""
    nodes = min(MOST_NODES, round(measured.workers))
    if nodes < 2:
        raise ValueError(f"the swarm has {measured.workers:.0f} worker: there is nobody to wait for")
    tried = candidates(nodes)
    if present is not None and present.method != "custom":
        tried["as it runs"] = present
    found: list[Prediction] = []
    for name, barrier in tried.items():
        found.append(_predict(name, barrier, measured, nodes, seed, found))
        progress(len(found) / len(tried))
    own = next((prediction for prediction in found if prediction.name == "as it runs"), None)
    return Advice(tuple(found), choose(found, keep), nodes, measured.model()[1], own)


def choose(predictions: Sequence[Prediction], keep: float) -> Prediction:
    """The rule of this module; asp where nothing keeps enough."""
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
        repoll_s=resample_after(measured.resample_s, times.mean_s),
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
