"""A problem for simulated nodes that is quickly learnt."""

from __future__ import annotations

import numpy as np

from tools.psp.problems import Vector, batch_of


class LinearRegression:
    """y = x·w + noise; the score is the relative distance from the true w."""

    name, better = "linear regression", "lower"

    def __init__(
        self, seed: int, *, size: int = 100, learning_rate: float = 0.01, batch: int = 16, noise: float = 0.1
    ) -> None:
        generator = np.random.default_rng(seed)
        self.size = size
        self._seed = seed
        self._truth = generator.standard_normal(size).astype(np.float32)
        self._x = generator.standard_normal((5000, size)).astype(np.float32)
        self._y = self._x @ self._truth + noise * generator.standard_normal(5000).astype(np.float32)
        self._rate, self._batch = learning_rate, batch

    def initial(self) -> Vector:
        return np.zeros(self.size, np.float32)

    def delta(self, vector: Vector, node: int, step: int) -> Vector:
        rows = batch_of(self._seed, node, step, len(self._x), self._batch)
        error = self._x[rows] @ vector - self._y[rows]
        return np.asarray((-self._rate / self._batch) * (error @ self._x[rows]), np.float32)

    def score(self, vector: Vector) -> float:
        return float(np.linalg.norm(vector - self._truth) / np.linalg.norm(self._truth))
