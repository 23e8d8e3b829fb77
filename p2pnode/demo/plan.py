"""Plans a demo and evaluates its outcome: each node's configuration, whether the goal is reached, and the summary.

Each node gets a part of the data that lacks some classes, so that no node alone can reach the goal.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pnode.config.settings import Config, LogSettings, StatusSettings
from p2pnode.overlay.settings import NodeSettings, SwarmSettings
from p2pnode.training.settings import BarrierMethod, BarrierSettings, TrainingSettings

#: Evaluations in a row that must reach the goal at every node.
EVALUATIONS = 3
#: Classes missing from each node's data. With 3 of 10 missing, a node that trains alone cannot exceed 0.7 accuracy.
LACKING = 3
#: If the demo is killed, its nodes end by themselves this many seconds after the time limit.
ORPHAN_S = 60.0
#: Task options for a demo on two cores. The convolutional network uses plain SGD, which tolerates classes that a node
#: never sees better than AdamW does. It is evaluated on the first 2,000 test images, because all 10,000 at every node
#: would take longer than the training.
PRESETS: dict[str, dict[str, Any]] = {
    "mnist": {"optimizer": "sgd", "learning_rate": 0.1, "batch_size": 32, "eval_samples": 2000},
}
TIME_LIMIT_S = {"mnist": 900.0}
DEFAULT_TIME_LIMIT_S = 180.0


@dataclass(frozen=True)
class DemoPlan:
    """The options of a demo. `until` is an accuracy from 0 to 1; `keep` a folder in which to leave the files."""

    nodes: int = 4
    task: str = "digits"
    data_dir: str = ""
    until: float = 0.95
    barrier: BarrierMethod = "pssp"
    time_limit_s: float = DEFAULT_TIME_LIMIT_S
    seed: int = 0
    keep: Path | None = None
    #: The program of the nodes. Tests replace it.
    program: tuple[str, ...] = (sys.executable, "-m", "p2pnode")
    alone_command: tuple[str, ...] = (sys.executable, "-m", "p2pnode.training.trainer.standalone")


@dataclass(frozen=True)
class DemoResult:
    """The outcome: `reason` is empty on success; `accuracies` are the last ones, None where there was none."""

    success: bool
    reason: str
    seconds: float
    statuses: tuple[dict[str, Any], ...]
    accuracies: tuple[float | None, ...]


def options(plan: DemoPlan, part: int) -> dict[str, Any]:
    """The task options that give a node its part of the data."""
    # For a single node no other could hold the missing classes.
    share = {"part": part, "parts": plan.nodes, "lacking": LACKING if plan.nodes > 1 else 0}
    return PRESETS.get(plan.task, {}) | share


def node_config(plan: DemoPlan, folder: Path) -> Config:
    """What all nodes are told; each has its `options`."""
    return Config(
        node=NodeSettings(state_dir=str(folder), host="127.0.0.1", port=0),
        swarm=SwarmSettings(run=f"demo-{plan.task}"[:64]),
        training=TrainingSettings(
            task=plan.task,
            data_dir=plan.data_dir,
            min_nodes=plan.nodes,
            threads=1,
            seed=plan.seed,
            eval_steps=5,
            max_seconds=plan.time_limit_s + ORPHAN_S,
            linger_s=5.0,
            checkpoint_s=0.0,
        ),
        barrier=BarrierSettings(method=plan.barrier),
        status=StatusSettings(port=0),
        log=LogSettings(format="console"),
    )


def goal_held(accuracies: Sequence[Sequence[float]], goal: float) -> bool:
    """Whether the last `EVALUATIONS` evaluations of every node all reached the goal."""
    return all(
        len(seen) >= EVALUATIONS and all(accuracy >= goal for accuracy in seen[-EVALUATIONS:]) for seen in accuracies
    )


def summary(plan: DemoPlan, reached: DemoResult, alone: Sequence[float]) -> dict[str, Any]:
    """The figures of a demo as one JSON object; a figure that could not be measured is null."""
    statuses = reached.statuses
    steps = [int(status.get("step") or 0) for status in statuses]
    accuracies = [value for value in reached.accuracies if value is not None]
    estimates = [(status.get("population") or {}).get("estimate") for status in statuses]
    known = [float(estimate) for estimate in estimates if estimate is not None]
    sent = [int((status.get("exchange") or {}).get("bytes_sent") or 0) for status in statuses]
    return {
        "schema": 1,
        "success": reached.success,
        "reason": reached.reason,
        "task": plan.task,
        "barrier": plan.barrier,
        "nodes": plan.nodes,
        "seconds": round(reached.seconds, 2),
        "steps_per_node": steps,
        # The lowest accuracy of all nodes, because every node must reach the goal.
        "accuracy": min(accuracies) if len(accuracies) == plan.nodes else None,
        "alone": round(statistics.mean(alone), 4) if alone else None,
        "alone_each": [round(value, 4) for value in alone],
        "population_estimate": round(statistics.mean(known), 2) if known else None,
        "bytes_sent_per_node_and_step": round(sum(sent) / sum(steps)) if sum(steps) else None,
    }
