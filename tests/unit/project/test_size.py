"""`make size`: what is counted, of small trees that are written here."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.harness.project.repository import ROOT
from tools.size import MOST_PARAMETERS, imports_of, measured, parameters, requests, statements, table, traced, unpacked
from tools.traced_step import WARM_UP, WINDOWS, TracedSteps, summary


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_a_tree_is_counted_by_package(tmp_path: Path) -> None:
    """`source` is the sum of the three packages; `training/exchange` is counted in `training` too."""
    tree = written(
        tmp_path,
        {
            "overlay/peers.py": '"""Peers."""\n\nA = 1\n',
            "training/loop.py": "class Loop:\n    pass\n",
            "training/exchange/push.py": "import p2pnode.training.loop\n",
            "docs/events.md": "| event |\n| `joined` | info |\n| `left` | info |\n",
            "docs/config.md": "| key |\n|---|\n| `port` | 1 |\n| `steps` | 2 |\n| `seed` | 3 |\n| 4 | no setting |\n",
            "README.md": "two words",
        },
    )

    counts = measured(tree, traces=False)

    assert counts["source: lines"] == 6
    assert counts["source: statements"] == 4
    assert (counts["training: modules"], counts["training/exchange: modules"]) == (2, 1)
    assert (counts["training: classes"], counts["tests: classes"]) == (1, 0)
    assert (counts["settings"], counts["events"]) == (3, 2)
    assert counts["documents: words"] == 2 + 13 + 25
    assert counts["one step: functions"] is None


def test_docstrings_are_no_statements() -> None:
    """Nor are other constants that stand alone; nested statements count each."""
    assert statements(ast.parse('"""One."""\ndef f():\n    """Two."""\n    if 1:\n        return 2\n')) == 3


def test_imports_are_counted_inside_and_from_outside() -> None:
    """Each pair of modules once, also inside functions; an import of a name is one of its module."""
    modules = {
        "training/exchange/push.py": ast.parse(
            "from p2pnode.training.exchange import pull\nimport p2pnode.training.loop"
        ),
        "training/exchange/pull.py": ast.parse("import numpy"),
        "training/loop.py": ast.parse(
            "from p2pnode.training.exchange.push import Push, Pushed\n"
            "def f():\n    from p2pnode.training.exchange.push import Later"
        ),
    }

    assert imports_of(modules, "training/exchange") == (1, 1)


def test_requests_are_the_registered_names() -> None:
    """Texts, and constants of this or another module; what is registered under a class is no stream."""
    modules = {
        "overlay/hello.py": ast.parse('HELLO, OTHER = "hello", "other"'),
        "overlay/server.py": ast.parse(
            "from p2pnode.overlay import hello\nfrom p2pnode.overlay.hello import OTHER as O\nPROBE = 'probe'\n"
            "a.register(PROBE, f)\na.register('pull', f)\na.register_bare(hello.HELLO, f)\na.register(O, f)\n"
            "a.register(Ping, f)\na.register()\n"
        ),
    }

    assert requests(modules) == {"probe", "pull", "hello", "other"}


def test_constructors_are_counted_without_self() -> None:
    """A dataclass has no written one: its fields are counted beside."""
    text = (
        "class A:\n    def __init__(self, a, /, b, *, c=1): ...\n"
        "@dataclass(frozen=True)\nclass B:\n    x: int\n    y: int\n"
    )

    assert parameters([ast.parse(text)]) == ([3], [2])
    assert MOST_PARAMETERS == 8


def test_a_count_that_a_tree_does_not_allow_is_a_dash() -> None:
    """In its column, in the order of the first tree."""
    lines = table({"old": {"modules": 1234, "events": None}, "new": {"modules": 1}})

    assert [line.split() for line in lines] == [["old", "new"], ["modules", "1,234", "1"], ["events", "-", "-"]]


def called_always() -> None:
    [lambda: None for _ in range(2)]


def called_once() -> None:
    pass


def test_a_function_is_on_the_way_if_each_step_calls_it() -> None:
    """What the steps before the windows call does not count, nor what is called in some steps alone."""
    steps = TracedSteps()
    try:
        for step in range(WARM_UP + WINDOWS):
            steps.append(step)
            called_always()
            if step == WARM_UP:
                called_once()
    finally:
        sys.setprofile(None)

    assert steps.is_over
    assert called_always.__code__ in steps.passed()
    assert called_once.__code__ not in steps.passed()


def test_only_functions_of_the_packages_are_summed(tmp_path: Path) -> None:
    """Methods of one class count it once; a function inside a method belongs to the class; lambdas count nothing."""
    text = "class A:\n    def f(self):\n        def g(): pass\n        return g, lambda: 1\n    def h(self): pass\n"
    names: dict[str, type] = {}
    exec(compile(text, str(tmp_path / "overlay" / "a.py"), "exec"), names)
    made = names["A"]()
    inner, nameless = made.f()
    codes = [one.__code__ for one in (made.f, made.h, inner, nameless, called_once)]

    assert summary(codes, tmp_path) == {"functions": 3, "classes": 1, "files": 1}


@pytest.mark.long
@pytest.mark.slow
def test_a_step_of_the_working_tree_is_traced(tmp_path: Path) -> None:
    """The program runs in a copy and counts the copy's functions, twice the same."""
    tree = unpacked("", tmp_path)

    first = traced(tree)

    assert min(first.values()) > 10
    assert traced(tree) == first
    assert not tree.is_relative_to(ROOT)
