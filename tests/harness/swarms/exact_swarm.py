"""A swarm of stub trainers that adds each delta once with weight 1, in float32: its model is an exact sum."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from tests.harness.swarms.simulated_swarm import play
from tests.harness.swarms.swarm import Swarm
from tests.harness.trainers.stub_trainer import StubTrainer, exponential, initial_vector

SIZE = 256
#: Few, because each costs every step a push and a pull.
SHARDS = 4
EXACT: dict[str, Any] = {
    "exchange.weight": "sum",
    "exchange.outer_lr": 1.0,
    "exchange.outer_momentum": 0.0,
    "exchange.codec": "float32",
    "exchange.shards": SHARDS,
    "training.linger_s": 30.0,
}


def simulate(
    scenario: Callable[[Swarm], Awaitable[None]],
    *,
    seed: int,
    step_s: float = 1.0,
    trainer: Callable[..., StubTrainer] = StubTrainer,
    **settings: Any,
) -> Swarm:
    """Plays a scenario with `settings` (`exchange__shards`) of all nodes, whose steps take `step_s` on average."""
    chosen = {**EXACT, **{key.replace("__", "."): value for key, value in settings.items()}}
    return play(
        scenario,
        lambda: Swarm(
            seed=seed,
            settings=chosen,
            make_trainer=lambda name: trainer(name, SIZE, step_s=exponential(step_s), start_s=0.3),
        ),
    )


def acknowledged(swarm: Swarm, *, without: tuple[str, ...] = ()) -> np.ndarray:
    """The initial vector and every delta of every trainer, but of those nodes: the model once all are acknowledged."""
    total = initial_vector(0, SIZE).astype(np.float64)
    for name, host in swarm.hosts.items():
        if name not in without:
            total += host.trainer.expected()
    return total.astype(np.float32)
