"""Makes records for a tracker from the progress of this node. Pure.

A record has a step, the time, and numbers by name. A step has those of its row in `/steps`; the newest one has the
metrics that the trainer reported as `train/NAME`. An evaluation of the shared model is a record of its own, with the
step of that model and the metrics as `eval/NAME`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from training.progress import Progress, StepRow


class Record(NamedTuple):
    """Numbers of one step at one time (`wall_s`: seconds since 1970)."""

    step: int
    wall_s: float
    values: dict[str, float]


class StepFeed:
    """Remembers what was taken, so that each step and each evaluation is taken once."""

    def __init__(self) -> None:
        self._last: StepRow | None = None
        self._evaluated: tuple[int | None, Mapping[str, float]] = (None, {})

    def take(self, progress: Progress, wall_s: float, others: Mapping[str, float] = {}) -> list[Record]:
        """The records since the last call, oldest first. `others` are numbers of now, kept with the newest step."""
        rows: list[StepRow] = []
        for row in reversed(progress.steps):
            if row is self._last:
                break
            rows.append(row)
        records = [Record(row["step"], wall_s, _numbers(row)) for row in reversed(rows)]
        if rows:
            self._last = rows[0]
            records[-1].values.update({f"train/{name}": value for name, value in progress.training_metrics.items()})
            records[-1].values.update(others)
        evaluated = (progress.evaluated_step, dict(progress.evaluated_metrics))
        if progress.evaluated_step is not None and evaluated != self._evaluated:
            self._evaluated = evaluated
            values = {f"eval/{name}": value for name, value in progress.evaluated_metrics.items()}
            records.append(Record(progress.evaluated_step, wall_s, values))
        return records


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row; tables by reason or by node are left out."""
    return {
        name: value
        for name, value in row.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }
