"""Plans of small simulated swarms, and a custom barrier for them."""

from __future__ import annotations

from typing import Any

from p2pnode.training.settings import BarrierSettings
from p2pnode.training.simulation.plan import Plan
from p2pnode.training.simulation.step_times import parse_step_times, parse_stragglers

SEED = 3


def small_plan(method: str, nodes: int, sample: int, **changes: Any) -> Plan:
    """Twenty seconds of a small swarm; `changes` are fields of the plan, or texts of its step times and stragglers."""
    print(f"seed {SEED}")
    barrier = BarrierSettings(
        method=method,
        sample=sample,
        staleness=changes.pop("staleness", 2),
        quantile=changes.pop("quantile", 1.0),
    )
    steps = parse_step_times(changes.pop("steps", "exp:1"))
    slow = parse_stragglers(changes.pop("slow", ""))
    usual: dict[str, Any] = {"duration_s": 20.0, "repoll_s": 0.1, "seed": SEED}
    return Plan(nodes=nodes, barrier=barrier, steps=steps, stragglers=slow, **(usual | changes))


def never(_mine: int, _others: list[int]) -> bool:
    """A custom barrier that no node passes."""
    return False
