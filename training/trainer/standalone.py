"""Trains a task without a swarm: `python -m training.trainer.standalone --task digits --steps 60 --json`.

The baseline of the demo and the benchmarks: the same task and loop, nothing shared. Each step's delta is added to the
vector unchanged.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from p2pnode.training.trainer.lazy_dynamo import import_later
from p2pnode.training.trainer.loading import build_task, resolve_device
from p2pnode.training.trainer.runner import TaskRunner
from p2pnode.training.trainer_link.interface import StepOrder, TrainerFailed
from p2pnode.training.trainer_link.messages import DeltaEncoded, ValuesArrived


def train_alone(
    task_name: str,
    options: dict[str, Any],
    *,
    local_steps: int,
    steps: int,
    data_dir: str = "",
    seed: int = 0,
    node_seed: int | None = None,
    device: str = "auto",
) -> dict[str, float]:
    """Train, evaluate once, and return the metrics, `samples` and `seconds`. Raises `TrainerFailed`."""
    task, spec = build_task(
        task_name,
        options,
        data_dir=data_dir,
        seed=seed,
        node_seed=seed + 1 if node_seed is None else node_seed,
        device=resolve_device(device),
    )
    runner = TaskRunner(task_name, task, spec, warn=lambda _event, message, _do="": print(message, file=sys.stderr))  # noqa: T201
    vector = np.zeros(runner.model_vector.layout.total, np.float32)
    delta = np.zeros_like(vector)
    runner.model_vector.read(vector)
    runner.use(vector, delta)
    began_s = time.perf_counter()
    for step in range(1, steps + 1):
        runner.train(StepOrder(step, local_steps, 1.0, step == 1))
        vector += delta
        runner.apply(DeltaEncoded())
        runner.apply(ValuesArrived(step))
    seconds = time.perf_counter() - began_s
    evaluation = runner.evaluate(steps)
    assert evaluation is not None
    return {**evaluation.metrics, "samples": float(runner.samples_seen), "seconds": round(seconds, 3)}


def main() -> int:
    """Exit code 0, or 8 with one sentence on standard error (docs/config.md)."""
    parser = argparse.ArgumentParser(
        prog="python -m p2pnode.training.trainer.standalone", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--task", required=True)
    parser.add_argument("--options", default="{}", help="JSON, as [training.options]")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--local-steps", type=int, default=10)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--node-seed", type=int, default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        options = msgspec.json.decode(arguments.options, type=dict[str, Any])
    except msgspec.DecodeError as error:
        parser.error(f"--options is not a JSON object: {error}")
    import_later()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    try:
        metrics = train_alone(
            arguments.task,
            options,
            local_steps=arguments.local_steps,
            steps=arguments.steps,
            data_dir=str(Path(arguments.data_dir).absolute()) if arguments.data_dir else "",
            seed=arguments.seed,
            node_seed=arguments.node_seed,
            device=arguments.device,
        )
    except TrainerFailed as failure:
        print(f"{failure.reason} ({failure.hint})" if failure.hint else failure.reason, file=sys.stderr)  # noqa: T201
        return 8
    text = json.dumps(metrics) if arguments.json else "  ".join(f"{key} {value:.4g}" for key, value in metrics.items())
    print(text)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
