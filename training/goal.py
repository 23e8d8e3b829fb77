"""When a run ends: `max_steps`, `max_seconds`, or a metric that reaches its goal; and which metrics were best. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

#: `passes`: all passes over the dispatched records are done. `script`: the training script has returned, or has called
#: `swarm.leave()`.
End = Literal["max_steps", "max_seconds", "until", "passes", "script", "leave", "trainer_failed"]
_UNTIL = re.compile(r"^\s*([A-Za-z_][\w.]*)\s*(>=|<=)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*$")


@dataclass(frozen=True, slots=True)
class Goal:
    """A parsed `training.until`."""

    metric: str
    at_least: bool
    value: float

    @classmethod
    def parse(cls, text: str) -> Goal | None:
        """None for the empty text. Raises `ValueError` for any other text that is no goal."""
        if not text.strip():
            return None
        match = _UNTIL.match(text)
        if match is None:
            raise ValueError(f'until = {text!r} is not of the form "accuracy>=0.95" or "loss<=0.1"')
        return cls(match[1], match[2] == ">=", float(match[3]))

    def holds(self, metrics: dict[str, float]) -> bool:
        value = metrics.get(self.metric)
        return value is not None and (value >= self.value if self.at_least else value <= self.value)


#: A metric whose name has one of these words is better when it is lower.
LOWER_IS_BETTER = frozenset(
    ("loss", "error", "err", "perplexity", "ppl", "nll", "mse", "rmse", "mae", "wer", "cer", "bpc", "bpb", "bits")
)


@dataclass(frozen=True, slots=True)
class Best:
    """The best value of one metric of the shared model, and the step of that model."""

    metric: str
    value: float
    step: int


class BestMetrics:
    """The best value of every metric that was evaluated."""

    def __init__(self, goal: Goal | None) -> None:
        self._goal = goal
        self._best: dict[str, Best] = {}

    def note(self, step: int, metrics: dict[str, float]) -> None:
        """Take the metrics of one evaluation into account; values that are not finite are none."""
        for name, value in metrics.items():
            known = self._best.get(name)
            if math.isfinite(value) and (known is None or self._is_better(name, value, known.value)):
                self._best[name] = Best(name, value, step)

    def _is_better(self, name: str, value: float, than: float) -> bool:
        if self._goal is not None and name == self._goal.metric:
            return value > than if self._goal.at_least else value < than
        is_low = not LOWER_IS_BETTER.isdisjoint(re.split(r"[^a-z]+", name.lower()))
        return value < than if is_low else value > than

    def best(self) -> Best | None:
        """The best value of the goal's metric, or without one of the first metric that was reported."""
        if self._goal is not None and self._goal.metric in self._best:
            return self._best[self._goal.metric]
        return next(iter(self._best.values()), None)
