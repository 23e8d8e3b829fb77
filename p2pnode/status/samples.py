"""Makes a row of the history of a status: rates between two looks, and the shares of time of the steps since. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from p2pnode.status.schema import Status
from training.progress import StepRow

#: Rates are means over so many seconds, or over four steps where these take longer: a rate per second would alternate
#: between nothing and much. At most the last.
RATE_S, RATE_STEPS, MOST_RATE_S = 10.0, 4.0, 300.0
#: Steps that a share of time can be made of: very fast ones, of the last seconds only.
MOST_STEPS = 2000
#: The first metrics that a script evaluates are kept, so many: a chart shows no more, and memory stays fixed.
METRICS = 4
#: The phases of a step, by the keys of `StepRow`.
PHASES = ("train", "push", "wait", "pull")
FIXED = (
    "step",
    "loss",
    "samples_per_second",
    "step_seconds",
    *(f"{phase}_share" for phase in PHASES),
    "sent_bytes_per_second",
    "received_bytes_per_second",
    "upload_bytes_per_second",
    "download_bytes_per_second",
    "population",
    "population_low",
    "population_high",
    "population_zone",
    "peers",
    "workers",
    "loop_delay_ms",
    "training_share",
)
#: The columns of the history: the fixed ones, and places for metrics.
COLUMNS = (*FIXED, *(f"metric_{place}" for place in range(METRICS)))

Row = dict[str, float | None]


class _Counters(NamedTuple):
    """What only rises, at one moment."""

    time: float
    samples: int
    sent: int
    received: int


class Sampler:
    """Compares each status with the one before. `metrics` are the names of those that are kept, by place."""

    def __init__(self) -> None:
        self.metrics: list[str] = []
        self._earlier: deque[_Counters] = deque()
        self._step: int | None = None
        self._ended: deque[tuple[float, StepRow]] = deque(maxlen=MOST_STEPS)

    def row(self, now: float, status: Status, steps: Sequence[StepRow]) -> Row:
        """The figures at `now` (monotonic seconds). `steps`: the last ones, of which those completed since count."""
        exchange, training, line, population = status.exchange, status.training, status.line, status.population
        row: Row = {
            "step": status.step,
            "loss": training.loss,
            "step_seconds": training.step_seconds or None,
            "population": population.estimate,
            # A swarm that is counted has no interval, and no second method.
            "population_low": None if population.exact else population.low,
            "population_high": None if population.exact else population.high,
            "population_zone": None if population.exact else population.zone_estimate,
            "peers": status.overlay.get("peers"),
            "workers": population.workers,
            "loop_delay_ms": status.loop.delay_ms_p99,
            "training_share": training.training_share,
        }
        if line is not None:
            row["upload_bytes_per_second"] = line.upload_bytes_per_s
            row["download_bytes_per_second"] = line.download_bytes_per_s
        current = _Counters(now, training.samples, exchange.bytes_sent, exchange.bytes_received)
        span_s = min(max(RATE_S, RATE_STEPS * training.step_seconds), MOST_RATE_S)
        row |= self._rates(current, span_s)
        row |= self._shares(now, status.step, steps, span_s)
        for name, value in training.metrics.items():
            if name not in self.metrics and len(self.metrics) < METRICS and name != "loss":
                self.metrics.append(name)
            if name in self.metrics:
                row[f"metric_{self.metrics.index(name)}"] = value
        return row

    def _rates(self, current: _Counters, span_s: float) -> Row:
        """Per second since the oldest look within `span_s`; none at the first look, nor after a counter has fallen, as
        where the exchange begins anew."""
        earlier = self._earlier
        if earlier and any(now < before for now, before in zip(current, earlier[-1], strict=True)):
            earlier.clear()
        while len(earlier) > 1 and current.time - earlier[0].time > span_s:
            earlier.popleft()
        first = earlier[0] if earlier else current
        earlier.append(current)
        passed_s = current.time - first.time
        if passed_s <= 0.0:
            return {}
        return {
            "samples_per_second": (current.samples - first.samples) / passed_s,
            "sent_bytes_per_second": (current.sent - first.sent) / passed_s,
            "received_bytes_per_second": (current.received - first.received) / passed_s,
        }

    def _shares(self, now: float, step: int, steps: Sequence[StepRow], span_s: float) -> Row:
        """How the time of the steps divides that have ended within `span_s`; none before the second look."""
        if self._step is not None:
            self._ended.extend((now, row) for row in steps if row["step"] > self._step)
        self._step = step
        while self._ended and now - self._ended[0][0] > span_s:
            self._ended.popleft()
        return shares(row for _, row in self._ended)

    def named(self, series: Mapping[str, list[float]]) -> dict[str, list[float]]:
        """The series of a history by the names that readers see: a metric's own instead of its place."""
        names = {f"metric_{place}": f"metric:{name}" for place, name in enumerate(self.metrics)}
        kept = (name for name in series if name in FIXED or name in names)
        return {names.get(name, name): series[name] for name in kept}

    def named_row(self, row: Row) -> Row:
        """One row by the same names."""
        names = {f"metric_{place}": f"metric:{name}" for place, name in enumerate(self.metrics)}
        return {names.get(name, name): value for name, value in row.items()}


def shares(steps: Iterable[StepRow]) -> Row:
    """How the time of these steps divides among their phases, from 0 to 1; empty without steps."""
    spent = dict.fromkeys(PHASES, 0.0)
    for step in steps:
        spent["train"] += step.get("train_seconds", 0.0)
        spent["push"] += step.get("push_seconds", 0.0)
        spent["wait"] += step.get("wait_seconds", 0.0)
        spent["pull"] += step.get("pull_seconds", 0.0)
    total = sum(spent.values())
    return {f"{phase}_share": seconds / total for phase, seconds in spent.items()} if total > 0.0 else {}
