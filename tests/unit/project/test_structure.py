"""Limits on the size of modules and constructors, unique names of public classes, and tests found by their name."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.harness.project.repository import PACKAGES, ROOT, sources, syntax_nodes

MAX_LINES = 450
#: Modules that may be longer, each with the reason.
LONGER: dict[str, str] = {}
MAX_PARAMETERS = 8


def constructors(path: str) -> list[tuple[str, int]]:
    """The name of each class with its own `__init__`, and how many parameters that takes besides `self`."""
    found = []
    for node in syntax_nodes(path):
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                    arguments = member.args
                    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                    found.append((node.name, len(named) - 1))
    return found


def test_no_module_is_long() -> None:
    """A module has at most 450 lines, or a reason to be longer; no reason outlives its module's length."""
    lines = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in sources(*PACKAGES)}

    assert {path for path, count in lines.items() if count > MAX_LINES} == set(LONGER)


def test_no_constructor_takes_many_parameters() -> None:
    """A constructor has at most eight parameters: more belong into one object, such as the environment."""
    found = [(path, name, count) for path in sources(*PACKAGES) for name, count in constructors(path)]

    assert [(path, name, count) for path, name, count in found if count > MAX_PARAMETERS] == []
    assert len(found) > 50


def test_a_public_class_name_is_used_once() -> None:
    """No two public classes of the packages share a name, so that a name in a log or a review means one class.

    The callbacks of `p2pnode.integrations` do: a script imports one of them, from the module named as its library.
    """
    places = defaultdict(set)
    for path in sources(*PACKAGES):
        if path.startswith("p2pnode/integrations/"):
            continue
        for node in syntax_nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(path)

    assert {name: sorted(paths) for name, paths in places.items() if len(paths) > 1} == {}
