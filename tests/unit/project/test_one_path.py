"""There is one implementation of the barrier predicates, and one of applying updates, in the whole repository."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.harness.project.repository import PACKAGES, ROOT, sources, syntax_nodes


@cache
def defined() -> dict[str, list[str]]:
    """The modules that define each function or method, by its name."""
    found: dict[str, list[str]] = {}
    for path in sources(*PACKAGES):
        for node in syntax_nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(node.name, []).append(path)
    return found


def functions(name: str) -> list[str]:
    """The modules that define a function or method of this name."""
    return defined().get(name, [])


def compares_steps(node: ast.AST) -> bool:
    """Whether it is a comparison of a difference with a staleness, `mine - other <= staleness`."""
    if not (isinstance(node, ast.Compare) and isinstance(node.left, ast.BinOp) and isinstance(node.left.op, ast.Sub)):
        return False
    if not isinstance(node.ops[0], ast.Lt | ast.LtE):
        return False
    names = {one.id for part in node.comparators for one in ast.walk(part) if isinstance(one, ast.Name)}
    names |= {one.attr for part in node.comparators for one in ast.walk(part) if isinstance(one, ast.Attribute)}
    return any("stale" in name for name in names)


@pytest.mark.parametrize("name", ["ssp", "bsp", "asp", "quantile_of"])
def test_a_predicate_of_barriers_is_defined_once(name: str) -> None:
    """Every engine, the training loop and the simulator take the predicates of `training.barriers`."""
    assert functions(name) == ["training/barriers/predicates.py"]


def test_no_other_module_compares_steps_with_a_staleness() -> None:
    """The comparison is written once, apart from compiled kernels of the simulator, which tests compare with it."""
    found = {
        path
        for path in sources(*PACKAGES)
        if not path.startswith("training/simulation/")
        for node in syntax_nodes(path)
        if compares_steps(node)
    }

    assert found == {"training/barriers/predicates.py"}


def test_updates_of_named_values_are_reduced_in_one_place() -> None:
    """The built-in reducers are defined once, and the owners of a swarm use that. Map-reduce has elements
    and no values; its own function of that name combines them."""
    assert functions("reduced") == ["training/engines/mapreduce/stages.py", "training/values/reducers.py"]
    users = {path for path in sources(*PACKAGES) if "import BUILT_IN, reduced" in (ROOT / path).read_text("utf-8")}
    assert users == {"training/shards/value_updates.py"}


def test_every_engine_waits_with_the_waiter_of_training() -> None:
    """The barrier of an engine is the `BarrierWaiter` of the training loop; no other class waits for peers' steps."""
    users = {path for path in sources(*PACKAGES) if "BarrierWaiter(" in (ROOT / path).read_text("utf-8")}

    assert users == {"p2pnode/lifecycle/engine_run.py", "p2pnode/lifecycle/node.py"}
