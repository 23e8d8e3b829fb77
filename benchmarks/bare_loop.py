"""A task in the plain torch loop, in a process that runs on request: the baseline for a node's speed.

No runner, no vector, no daemon: zero_grad, loss, backward, step. It reads JSON lines and answers each with one:
`{"calibrate": seconds, "width": n}` finds how many rounds of `benchmarks.tasks:Load` fill an optimiser step, on the
`device` if one is given, and not where the `options` are given that another loop has found;
`{"train": seconds}` trains that long and answers with optimiser steps and seconds. It ends when its input does.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from p2pnode.training.trainer.loading import build_task

TASK = "benchmarks.tasks:Load"
#: Optimiser steps of one timing while the load is sized.
TIMED_STEPS = 15
#: Not timed, after a rest: the node's first step of a turn is not either.
WARM_S = 0.1
MOST_ROUNDS = 4096


def stepper(options: dict[str, Any], device: str = "cpu") -> Callable[[], None]:
    """One optimiser step of the task; it ends when the device has computed it."""
    task, spec = build_task(TASK, options, data_dir="", seed=0, node_seed=1, device=device)
    batches = iter(task.batches())

    def step() -> None:
        spec.optimizer.zero_grad(set_to_none=True)
        task.loss(spec.model, next(batches)).backward()  # type: ignore[no-untyped-call]
        spec.optimizer.step()
        if device != "cpu":
            torch.cuda.synchronize(device)

    return step


def step_seconds(options: dict[str, Any], device: str = "cpu") -> float:
    """The shortest of some optimiser steps: the time of the load without other load on the processor."""
    step = stepper(options, device)
    durations_s = []
    for _ in range(TIMED_STEPS):
        began_s = time.perf_counter()
        step()
        durations_s.append(time.perf_counter() - began_s)
    return min(durations_s)


def calibrated(target_s: float, timed: Callable[[int], float]) -> int:
    """Rounds that make an optimiser step last about `target_s`; at least 1. `timed` gives a step's seconds."""
    rounds = 1
    duration_s = timed(rounds)
    while duration_s < target_s / 2 and rounds < MOST_ROUNDS:
        rounds *= 2
        duration_s = timed(rounds)
    return max(1, min(MOST_ROUNDS, round(rounds * target_s / duration_s)))


def sized(target_s: float, width: int, device: str = "cpu") -> dict[str, Any]:
    """Options of the task that make its optimiser step last about `target_s` here and now."""
    return {
        "width": width,
        "rounds": calibrated(target_s, lambda rounds: step_seconds({"width": width, "rounds": rounds}, device)),
    }


def train_for(step: Callable[[], None], seconds: float) -> tuple[int, float]:
    """Optimiser steps done, and the seconds they took."""
    began_s = time.perf_counter()
    count = 0
    while (elapsed_s := time.perf_counter() - began_s) < seconds:
        step()
        count += 1
    return count, elapsed_s


def main() -> int:
    step: Callable[[], None] | None = None
    for line in sys.stdin:
        order = json.loads(line)
        if "calibrate" in order:
            device = order.get("device", "cpu")
            options = order.get("options") or sized(order["calibrate"], order["width"], device)
            step = stepper(options, device)
            answer: dict[str, Any] = {"options": options}
        else:
            assert step is not None, "calibrate comes first"
            train_for(step, WARM_S)
            count, seconds = train_for(step, order["train"])
            answer = {"optimizer_steps": count, "seconds": seconds}
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
