"""Runs a plan on the fastest engine that supports it.

`compiled` and `reference` give the same history for the same seed. `grouped` gives the same distribution: it draws
whether a sample passes, from the probability, instead of the sample. `auto` chooses it for sampled barriers under the
discipline `event`, and in large swarms under `repoll`. It runs a small plan on `reference`, which needs no compilation.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Literal

from training.errors import TrainingError
from training.simulation.engines.compiled import CompiledEngine
from training.simulation.engines.reference import Observer, ReferenceEngine
from training.simulation.engines.sliced import SlicedEngine
from training.simulation.model.outcome import Outcome
from training.simulation.model.plan import Plan

EngineName = Literal["auto", "compiled", "grouped", "reference"]


#: From this many nodes on the steps of a sample do not fit into the cache; drawing from a probability is faster.
GROUPED_FROM = 50_000
#: Up to this many expected steps the reference engine ends before a first compilation, of some ten seconds, would.
REFERENCE_STEPS = 3_000


class NotCompiled(TrainingError):
    """The requested engine does not support this plan; the message says why."""


def simulate(
    plan: Plan,
    *,
    engine: EngineName = "auto",
    moments_s: Sequence[float] = (),
    keep_trace: bool = False,
    observer: Observer | None = None,
    progress: Callable[[float], None] | None = None,
) -> Outcome:
    """Run one plan. `progress` is called repeatedly with the share done, in [0, 1].

    Raises `NotCompiled`, and `BarrierNotFound` if a custom barrier cannot be imported.
    """
    reason = why_not_compiled(plan) if observer is None else "an observer needs the reference engine"
    if engine == "grouped" and not reason:
        reason = why_not_grouped(plan)
    if engine in ("compiled", "grouped") and reason:
        raise NotCompiled(reason)
    if engine != "reference" and not reason:
        pays = plan.discipline == "event" or plan.nodes >= GROUPED_FROM
        grouped = engine == "grouped" or (engine == "auto" and pays and not why_not_grouped(plan))
        if grouped and plan.discipline == "repoll":
            return SlicedEngine(plan, moments_s, keep_trace=keep_trace).run(progress)
        is_small = plan.nodes * plan.duration_s <= REFERENCE_STEPS * plan.steps.mean_s
        if engine == "compiled" or grouped or not is_small:
            return CompiledEngine(plan, moments_s, keep_trace=keep_trace, grouped=grouped).run(progress)
    return ReferenceEngine(plan, moments_s=moments_s, keep_trace=keep_trace, progress=progress).run(observer)


def has_numba() -> bool:
    """Whether numba is installed, without importing it."""
    return importlib.util.find_spec("numba") is not None


def why_not_compiled(plan: Plan) -> str:
    """Why the compiled engine does not support this plan; empty if it does."""
    if not has_numba():
        return "numba is not installed"
    if plan.barrier.method == "custom":
        return "a custom barrier is Python"
    if plan.churn.rate > 0 or plan.delay_s > 0:
        return "it supports neither churn nor message delay"
    if plan.sampler != "uniform":
        return "it supports only uniform samples"
    if plan.discipline == "hold" and plan.barrier.quantile < 1.0 and plan.barrier.method in ("pbsp", "pssp"):
        return "held samples with a quantile wait for more than one peer"
    return ""


def why_not_grouped(plan: Plan) -> str:
    """Why a probability cannot replace a sample; empty if it can. The plan must be compilable as well."""
    if plan.discipline not in ("event", "repoll") or plan.barrier.method not in ("pbsp", "pssp"):
        return "only fresh, uniform samples can be grouped: pbsp and pssp, event or repoll"
    if plan.population_error > 0 and plan.barrier.sample == 0:
        return "nodes with samples of different sizes cannot be grouped"
    return ""
