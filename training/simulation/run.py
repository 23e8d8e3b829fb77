"""Runs a plan on the compiled engine where it supports the plan and pays, otherwise on the reference engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from p2pnode.training.errors import TrainingError
from p2pnode.training.settings import BarrierMethod
from p2pnode.training.simulation.compiled import run_compiled
from p2pnode.training.simulation.outcome import Outcome
from p2pnode.training.simulation.plan import Plan
from p2pnode.training.simulation.reference import ReferenceEngine

EngineName = Literal["auto", "compiled", "reference"]

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
    progress: Callable[[float], None] | None = None,
) -> Outcome:
    """Run one plan. `progress` is called repeatedly with the share done, in [0, 1].

    Raises `NotCompiled`, and `BarrierNotFound` if a custom barrier cannot be imported.
    """
    reason = why_not_compiled(plan)
    if engine == "compiled" and reason:
        raise NotCompiled(reason)
    is_small = plan.nodes * plan.duration_s <= REFERENCE_STEPS * plan.steps.mean_s
    if not reason and (engine == "compiled" or (engine == "auto" and not is_small)):
        return run_compiled(plan, moments_s=moments_s, keep_trace=keep_trace, progress=progress)
    return ReferenceEngine(plan, moments_s=moments_s, keep_trace=keep_trace, progress=progress).run()


def has_numba() -> bool:
    """Whether numba is installed, without importing it."""
    return importlib.util.find_spec("numba") is not None


def why_not_compiled(plan: Plan) -> str:
    """Why the compiled engine does not support this plan; empty if it does."""
    if not has_numba():
        return "numba is not installed"
    if plan.barrier.method not in get_args(BarrierMethod):
        return "a custom barrier is Python"
    if plan.churn.rate > 0 or plan.delay_s > 0:
        return "it supports neither churn nor message delay"
    if plan.sampler != "uniform":
        return "it supports only uniform samples"
    return ""
