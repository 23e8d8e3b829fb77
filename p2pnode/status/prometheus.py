"""The text form in which Prometheus reads a node's counters and sizes. Pure. Families in, text out.

Written here because the package `prometheus-client` takes 0.52 MB of a daemon that has 1.6 MB left of its 80, and keeps
a second copy of counters that exist already. What it would do stands on one page of rules:
https://prometheus.io/docs/instrumenting/exposition_formats/ (text format 0.0.4). A test reads the result with the
package's own parser.
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
    """One metric with its samples, each its labels and its value. Names are ours and legal; label values may be
    anything. Base units; a counter's name ends in `_total`. A value of None is left out."""

    name: str
    kind: Literal["counter", "gauge"]
    what: str
    samples: Sequence[Sample]


def single(
    name: str, kind: Literal["counter", "gauge"], what: str, value: float | int | None, labels: Mapping[str, str] = {}
) -> Family:
    """A family of one sample."""
    return Family(name, kind, what, [(labels, value)])


def render(families: Iterable[Family]) -> str:
    """The page. Families without a value are not mentioned."""
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
