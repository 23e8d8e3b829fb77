"""Options of the built-in tasks that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from p2pnode.training.trainer.loading import build_task
from p2pnode.training.trainer.runner import TaskRunner
from p2pnode.training.trainer_link.interface import TrainerFailed


def build(task: str, options: dict[str, Any], data_dir: str = "") -> TaskRunner:
    return TaskRunner(task, *build_task(task, options, data_dir=data_dir, seed=0, node_seed=1, device="cpu"))


@pytest.mark.parametrize(
    ("task", "options", "data_dir", "reason"),
    [
        ("digits", {"parts": 4, "lackign": 3}, "", "unknown field `lackign`"),
        ("digits", {"part": "one"}, "", "Expected `int`"),
        ("digits", {"part": 7, "parts": 4}, "", "part = 7 of parts = 4"),
        ("digits", {}, "/nowhere/digits", "finds no file /nowhere/digits"),
        ("mnist", {}, "/nowhere/mnist", "training.data_dir = /nowhere/mnist is not a folder"),
        ("mnist", {"optimizer": "lion"}, "", "optimizer"),
        ("text", {}, "", "training.data_dir is empty"),
        ("text", {}, "/nowhere/book.txt", "finds no file /nowhere/book.txt"),
        ("text", {}, "/", "is a folder"),
        ("text", {"width": 10, "heads": 3}, "", "cannot be divided"),
        ("text", {"context": 100000}, __file__, "too few"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    task: str, options: dict[str, Any], data_dir: str, reason: str
) -> None:
    """Misspelt options, impossible values and missing files; each has a hint."""
    with pytest.raises(TrainerFailed) as failure:
        build(task, options, data_dir)

    assert reason in failure.value.reason
    assert failure.value.hint
    assert failure.value.fatal
