"""The errors of map-reduce: values are shown shortened, functions by where they failed."""

from __future__ import annotations

import os

import pytest

from p2pnode.training.engines.mapreduce.errors import (
    SHOWN_CHARS,
    FunctionFailed,
    function_failed,
    shown,
)


class Wild:
    def __repr__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "'a'"),
        ("x" * (SHOWN_CHARS - 2), "'" + "x" * (SHOWN_CHARS - 2) + "'"),
        ("x" * (SHOWN_CHARS - 1), "'" + "x" * (SHOWN_CHARS - 2) + "…"),
        (Wild(), "<Wild whose repr raises ValueError>"),
    ],
)
def test_a_value_is_shown_shortened(value: object, text: str) -> None:
    """Also one that cannot be shown."""
    assert shown(value) == text


@pytest.mark.parametrize(
    ("element", "partition", "said"),
    [
        (7, 2, "map 1 failed for 7 of partition 2 on "),
        (("k", 7), 0, "map 1 failed for key 'k', ('k', 7) of partition 0 on "),
        ((1, 2, 3), 0, "map 1 failed for (1, 2, 3) of partition 0 on "),
        (7, -1, "map 1 failed for 7 on "),
    ],
)
def test_a_function_that_failed_names_element_partition_and_process(element: object, partition: int, said: str) -> None:
    """A pair by its key too; no partition where all are combined. The last line of the traceback ends it."""
    error = function_failed("map 1", element, partition, ValueError("wrong"))

    assert str(error).startswith(said)
    assert str(error).endswith(f"process {os.getpid()}: ValueError: wrong")
    assert str(FunctionFailed("map 1", "7", 0, "here", " \n")).endswith("on here: unknown")
