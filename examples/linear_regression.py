"""Peer-to-peer linear regression: each node improves a column of the weights, and its owner applies the changes.

    p2pnode run --set training.min_nodes=3 -- python examples/linear_regression.py

Start it on three machines; a joiner adds `--bootstrap HOST:PORT` or `--invite FILE`. No node has all weights: a column
is a named value at its owner. Nodes may come, go and be killed meanwhile.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import p2pnode

TRUE = np.array([[0.3, 0.5], [0.7, 0.4], [0.9, 0.2]])
START = np.full(len(TRUE), 0.1)


class Regression(p2pnode.Program):
    """Stochastic gradient descent on y = x · weights, a column at a time."""

    def __init__(self, steps: int, rows: int = 1000, rate: float = 0.35, pause_s: float = 0.0) -> None:
        self.steps, self.rate, self.pause_s = steps, rate, pause_s
        self.x = np.random.default_rng(7).uniform(size=(rows, len(TRUE)))
        self.y = self.x @ TRUE

    def schedule(self, ctx: p2pnode.Context) -> list[str]:
        return [f"column {ctx.rng.randrange(TRUE.shape[1])}"]

    def push(self, ctx: p2pnode.Context, params: list[tuple[Any, Any]]) -> Iterable[tuple[Any, Any]]:
        time.sleep(self.pause_s)
        batch = ctx.rng.sample(range(len(self.x)), 10)
        for key, column in params:
            weights = START if column is None else column
            error = self.x[batch] @ weights - self.y[batch, number_of(key)]
            yield key, self.rate * self.x[batch].T @ error / len(batch)

    def pull(self, ctx: p2pnode.Context, updates: Sequence[Any]) -> list[tuple[Any, Any, int]]:
        columns: dict[Any, tuple[Any, int]] = {}
        for one in updates:
            weights, stamp = columns.get(one.key) or ctx.get(one.key, START)
            columns[one.key] = weights - one.value, max(stamp, one.timestamp)
        return [(key, weights, stamp) for key, (weights, stamp) in columns.items()]

    def stop(self, ctx: p2pnode.Context) -> bool:
        return ctx.step >= self.steps


def number_of(key: str) -> int:
    """The number of a column."""
    return int(key.split()[1])


def main() -> None:
    """Train, and print the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of a step, to watch it")
    parser.add_argument("--barrier", choices=["asp", "bsp", "ssp", "pbsp", "pssp"])
    arguments = parser.parse_args()

    engine = p2pnode.engine("p2p", barrier=arguments.barrier)
    engine.start(Regression(arguments.steps, pause_s=arguments.pause))
    weights = np.stack([engine.get(f"column {number}").value for number in range(TRUE.shape[1])], axis=1)
    print("weights", weights.round(3).tolist(), "largest error", float(np.abs(weights - TRUE).max()))


if __name__ == "__main__":
    main()
