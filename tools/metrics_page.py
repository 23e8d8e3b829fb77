"""docs/metrics.md: every metric family that the daemon's code can write, read from the syntax tree. Pure.

A family is a call of `Family` or `single` with its name, kind and help. The help may be a name that was assigned in the
same function just before.
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
    """All families of the package `p2pnode`. Raises `LookupError` for one whose help cannot be read."""
    for path in sorted((root / "p2pnode").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "Family(" not in text and "single(" not in text:
            continue
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _of(function, path.name)


def _of(function: ast.FunctionDef | ast.AsyncFunctionDef, place: str) -> Iterator[Described]:
    texts: dict[str, str] = {}
    # Statements come in the order of the text, so that a name means its last assignment.
    for node in sorted(
        (one for one in ast.walk(function) if isinstance(one, ast.Assign | ast.Call)), key=lambda one: one.lineno
    ):
        if isinstance(node, ast.Assign):
            if isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Constant):
                texts[node.targets[0].id] = str(node.value.value)
        elif isinstance(node.func, ast.Name) and node.func.id in ("Family", "single") and len(node.args) >= 3:
            name, kind, what = node.args[:3]
            if not isinstance(name, ast.Constant) or not isinstance(kind, ast.Constant):
                continue
            said = what.value if isinstance(what, ast.Constant) else texts.get(getattr(what, "id", ""))
            if said is None:
                raise LookupError(f"{place}: the help of {name.value} cannot be read")
            yield Described(str(name.value), str(kind.value), str(said).replace("|", "\\|"))
