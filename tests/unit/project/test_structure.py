"""Limits on the size of modules and constructors, unique names of public classes, and tests found by their name."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

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


#: What decides in a function: branches, loops, comparisons and arithmetic. A module with none only defines types.
DECISIONS = (
    ast.If,
    ast.IfExp,
    ast.Match,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.comprehension,
    ast.BoolOp,
    ast.Compare,
    ast.BinOp,
    ast.AugAssign,
    ast.ExceptHandler,
)


def decides(path: str) -> bool:
    """Whether a function of the module has a decision; one in a parameter or a decorator is none."""
    return any(
        isinstance(inner, DECISIONS)
        for node in syntax_nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for statement in node.body
        for inner in ast.walk(statement)
    )


@cache
def imported(path: str) -> frozenset[str]:
    """The modules that a file imports anywhere, and the names that it imports from them, with dots."""
    found = set()
    for node in syntax_nodes(path):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    return frozenset(found)


def dotted(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


@cache
def files_of_tests() -> tuple[tuple[str, str, str], ...]:
    """The test files: name without `.py`, folder below `tests/<kind>`, path below the root."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        below = path.relative_to(ROOT)
        found.append((path.stem, "/".join(below.parts[2:-1]), below.as_posix()))
    return tuple(found)


@cache
def modules_by_name() -> dict[str, int]:
    """How many modules have each name."""
    return Counter(Path(path).stem for path in sources(*PACKAGES))


def has_test_of_its_name(module: str) -> bool:
    """Whether there is a `test_<module>.py` or `test_<module>_<what>.py`. `test_link.py` of one package says nothing of
    the `link.py` of another: where several modules have the name, it is in the mirrored folder, or imports this one."""
    name, parent = Path(module).stem, f"/{Path(module).parent.as_posix()}"
    for test, folder, path in files_of_tests():
        if test == f"test_{name}" or test.startswith(f"test_{name}_"):
            is_mirrored = folder != "" and parent.endswith(f"/{folder}")
            if modules_by_name()[name] == 1 or is_mirrored or dotted(module) in imported(path):
                return True
    return False


def test_a_module_that_decides_has_a_test_of_its_name() -> None:
    """Who looks for the test of a module finds it by its name. Modules that only define types need none."""
    modules = [path for path in sources(*PACKAGES) if Path(path).stem not in ("__init__", "__main__") and decides(path)]

    assert [path for path in modules if not has_test_of_its_name(path)] == []
    assert len(modules) > 400


def test_modules_that_only_define_types_are_told_by_their_syntax() -> None:
    """Fields, defaults and methods that only call or return are no decision; a condition in a method is one."""
    assert not decides("training/exchange/counters.py")
    assert not decides("p2pnode/status/limits.py")
    assert decides("training/exchange/value_messages.py")
    assert decides("training/dispatch/queue.py")
    assert modules_by_name()["link"] > 1
