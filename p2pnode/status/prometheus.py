"""Renders metric families in Prometheus' text format 0.0.4. Pure.

The package `prometheus-client` is not used: it takes 0.52 MB of memory and keeps a second copy of counters that exist
already. The format is one page: https://prometheus.io/docs/instrumenting/exposition_formats/. A test reads the result
with that package's parser.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Sample = tuple[Mapping[str, str], float | int | None]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric with its samples of labels and value. Label values may be any text; a value of None is left out.

    Units are base units; a counter's name ends in `_total`."""

    name: str
    kind: Literal["counter", "gauge"]
    what: str
    samples: Sequence[Sample]


Value = float | int | None
#: The one value of a family, or its samples.
Values = Value | Sequence[Sample]


def gauge(name: str, what: str, values: Values = None, /, **by: Mapping[str, Value]) -> Family:
    """A family of values that go up and down. `by`: the name of its one label, with a value for each of its values."""
    return Family(name, "gauge", what, _samples(values, by))


def counter(name: str, what: str, values: Values = None, /, **by: Mapping[str, Value]) -> Family:
    """A family of values that only rise while the daemon runs; otherwise as `gauge`."""
    return Family(name, "counter", what, _samples(values, by))


def _samples(values: Values, by: Mapping[str, Mapping[str, Value]]) -> Sequence[Sample]:
    if by:
        return [({label: key}, value) for label, found in by.items() for key, value in found.items()]
    return values if isinstance(values, Sequence) else [({}, values)]


def render(families: Iterable[Family]) -> str:
    """The whole page; families without a value are left out."""
    lines: list[str] = []
    for family in families:
        samples = [_line(family.name, labels, value) for labels, value in family.samples if value is not None]
        if samples:
            lines += [f"# HELP {family.name} {_escaped(family.what)}", f"# TYPE {family.name} {family.kind}", *samples]
    return "\n".join(lines) + "\n"


def _line(name: str, labels: Mapping[str, str], value: float | int) -> str:
    inside = ",".join(f'{key}="{_escaped(text, quotes=True)}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {_number(value)}" if inside else f"{name} {_number(value)}"


def _number(value: float | int) -> str:
    if isinstance(value, int):
        return str(int(value))
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)


def _escaped(text: str, *, quotes: bool = False) -> str:
    escaped = text.replace("\\", r"\\").replace("\n", r"\n")
    return escaped.replace('"', r"\"") if quotes else escaped
