"""Distributions of step times, stragglers, and the notation for both on the command line.

    exp:1   1+exp:1   gamma:4:0.25   lognormal:0:0.3   constant:2   0.1+gamma:4:0.25   trace:steps.json

A trace is the response of a node's `/steps`, or a JSON list of seconds; steps are drawn from it with replacement.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from p2pnode.training.errors import TrainingError
from p2pnode.training.simulation.random_streams import RandomStream

Kind = Literal["constant", "exp", "gamma", "lognormal", "trace"]
#: Parameters of each kind; the order is that of the compiled engine's numbers.
PARAMETERS: dict[Kind, int] = {"constant": 1, "exp": 1, "gamma": 2, "lognormal": 2, "trace": 0}

_STRAGGLERS = re.compile(r"^([\d.]+)%\s*[x×]\s*([\d.]+)(,transient)?$")


class BadModel(TrainingError, ValueError):
    """A text that does not name a model; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Distribution of a step's seconds: `shift_s` plus a draw of `kind`.

    `first` and `second` are: constant seconds; exp mean; gamma shape and scale; lognormal μ and σ of the logarithm.
    """

    kind: Kind
    first: float = 0.0
    second: float = 0.0
    shift_s: float = 0.0
    trace_s: tuple[float, ...] = ()

    @property
    def mean_s(self) -> float:
        """Mean seconds of a step."""
        match self.kind:
            case "constant" | "exp":
                return self.shift_s + self.first
            case "gamma":
                return self.shift_s + self.first * self.second
            case "lognormal":
                return self.shift_s + math.exp(self.first + 0.5 * self.second * self.second)
            case "trace":
                return self.shift_s + sum(self.trace_s) / len(self.trace_s)

    def draw(self, stream: RandomStream) -> float:
        """Seconds of one step."""
        match self.kind:
            case "constant":
                return self.shift_s + self.first
            case "exp":
                return self.shift_s + self.first * stream.exponential()
            case "gamma":
                return self.shift_s + self.second * stream.gamma(self.first)
            case "lognormal":
                return self.shift_s + math.exp(self.first + self.second * stream.normal())
            case "trace":
                return self.shift_s + self.trace_s[stream.below(len(self.trace_s))]


@dataclass(frozen=True, slots=True)
class Stragglers:
    """A share of the nodes whose steps take `factor` times as long: always the same nodes or, if `transient`, each
    step with that probability. Published figures do not state which they mean."""

    share: float = 0.0
    factor: float = 1.0
    transient: bool = False

    def count(self, nodes: int) -> int:
        """The number of nodes that are always slow: `int(share·P)`, as in the simulator Ninox (`docs/psp.md`)."""
        return 0 if self.transient else int(self.share * nodes + 1e-9)


def parse_step_times(text: str) -> StepTimes:
    """Parse a distribution, and read its file if it is a trace. Raises `BadModel`."""
    shift, _plus, rest = text.strip().partition("+") if "+" in text.split(":")[0] else ("0", "", text.strip())
    name, _, values = rest.partition(":")
    if name == "trace":
        return StepTimes("trace", shift_s=_number(shift, text), trace_s=read_trace(Path(values)))
    if name not in PARAMETERS:
        raise BadModel(
            f'"{text}" is not a model of step times: write exp:1, 1+exp:1, gamma:4:0.25, lognormal:0:0.3, '
            "constant:1 or trace:FILE"
        )
    kind: Kind = name
    numbers = [_number(value, text) for value in values.split(":")] if values else []
    if len(numbers) != PARAMETERS[kind]:
        raise BadModel(f'"{text}": {name} takes {PARAMETERS[kind]} number(s) after a colon')
    first, second = (*numbers, 0.0)[:2]
    if (first <= 0 and kind != "lognormal") or second < 0 or (kind == "gamma" and second == 0):
        raise BadModel(f'"{text}": its numbers must be above zero')
    return StepTimes(kind, first, second, _number(shift, text))


def parse_stragglers(text: str) -> Stragglers:
    """Parse `5%x4`, `5%x4,transient`, or an empty text for none. Raises `BadModel`."""
    if not text.strip():
        return Stragglers()
    match = _STRAGGLERS.match(text.strip())
    if match is None:
        raise BadModel(f'"{text}" is not of the form 5%x4 or 5%x4,transient')
    share, factor = _number(match[1], text) / 100.0, _number(match[2], text)
    if share > 1.0 or factor <= 0.0:
        raise BadModel(f'"{text}": at most 100 % can be slow, and by a factor above zero')
    return Stragglers(share, factor, match[3] is not None)


def read_trace(path: Path) -> tuple[float, ...]:
    """Step times from a file: a JSON list of seconds, or of rows with `train_seconds` as from `/steps`."""
    try:
        rows = json.loads(path.read_bytes())
    except OSError as error:
        raise BadModel(f"cannot read the trace {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise BadModel(f"the trace {path} is not JSON: {error}") from error
    return seconds_of(rows, str(path))


def seconds_of(rows: Sequence[Any], source: str) -> tuple[float, ...]:
    """The step times of rows from `/steps`, or of plain numbers. Raises `BadModel` if there is none."""
    if not isinstance(rows, list):
        raise BadModel(f"{source} is not a list of steps")
    values = [row.get("train_seconds") if isinstance(row, dict) else row for row in rows]
    seconds = tuple(float(value) for value in values if isinstance(value, int | float) and 0 < value < math.inf)
    if not seconds:
        raise BadModel(f"{source} has no step times: rows need train_seconds")
    return seconds


def _number(text: str, whole: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise BadModel(f'"{whole}": "{text}" is not a number') from None
    if not math.isfinite(number) or number < 0:
        raise BadModel(f'"{whole}": {text} must be finite and not negative')
    return number
