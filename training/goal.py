"""When a run ends: `max_steps`, `max_seconds`, or a metric that reaches its goal. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

End = Literal["max_steps", "max_seconds", "until", "leave", "trainer_failed"]
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
