"""The reasons of refusals: they are parts of counters' names, which `/status` and `/metrics` publish."""

from __future__ import annotations

import ast
from pathlib import Path

from p2pnode.overlay.sealing import refusal

FOLDER = Path(refusal.__file__).parent


def test_the_reasons_are_a_fixed_set() -> None:
    """Every `Refused` of the package is raised with one of these literal reasons."""
    found = set()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Refused":
                (reason,) = node.args
                assert isinstance(reason, ast.Constant), f"{path.name}: {ast.unparse(reason)}"
                found.add(reason.value)

    assert found == {
        "before_start",
        "busy",
        "clock",
        "forged",
        "impostor",
        "misdirected",
        "no_pair",
        "own_echo",
        "replayed",
        "stranger",
        "unasked",
        "unsigned",
    }
