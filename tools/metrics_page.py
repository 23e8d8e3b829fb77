"""docs/metrics.md: every metric family that the daemon's code can write, read from the syntax tree. Pure.

A family is a call of `gauge` or `counter` with its name and help.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

_HEAD = """\
# Metrics

Generated from the code by `make generated`; a test keeps it equal. Do not edit it by hand.

`GET /metrics` has these families in Prometheus' text format. A node writes those that it has a value for: those of
named values, devices, records and servers only where there are any. Counters begin at 0 with each start of the daemon.
[`deploy/prometheus/`](../deploy/prometheus) has alert rules for them, and [`deploy/grafana/`](../deploy/grafana) a
dashboard. [Troubleshooting](troubleshooting.md#by-alert) says what to do about an alert.

| metric | kind | meaning |
|---|---|---|
"""


class Described(NamedTuple):
    """A family as the code writes it."""

    name: str
    kind: str
    what: str


def metrics_page(root: Path = ROOT) -> str:
    """The whole page."""
    rows = [f"| `{one.name}` | {one.kind} | {one.what} |" for one in sorted(set(families(root)))]
    return _HEAD + "\n".join(rows) + "\n"


def families(root: Path) -> Iterator[Described]:
    """All families of the package `p2pnode`."""
    for path in sorted((root / "p2pnode").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ("gauge", "counter"):
                name, what = (str(ast.literal_eval(argument)) for argument in call.args[:2])
                if what:  # without: another field of the same family
                    yield Described(name, call.func.id, what.replace("|", "\\|"))
