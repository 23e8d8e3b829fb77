"""`make size`: what is counted, of small trees that are written here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.harness.project.repository import ROOT
from tools.size import measured, traced, unpacked
from tools.traced_step import WARM_UP, WINDOWS, TracedSteps


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


@pytest.mark.long
@pytest.mark.slow
def test_a_step_of_the_working_tree_is_traced(tmp_path: Path) -> None:
    """The program runs in a copy and counts the copy's functions, twice the same."""
    tree = unpacked("", tmp_path)

    first = traced(tree)

    assert min(first.values()) > 10
    assert traced(tree) == first
    assert not tree.is_relative_to(ROOT)
