"""Actions over a backend that records its tasks: what a value is made of, and what happens where something fails."""

from __future__ import annotations

import operator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from training.engines.mapreduce.actions import Actions
from training.engines.mapreduce.backends import InProcess, StageTask
from training.engines.mapreduce.errors import FunctionFailed, SinkFailed
from training.engines.mapreduce.plan import Lineage, LoadedParts


class Recording(InProcess):
    """Counts the tasks that are given at once."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def run(self, tasks: list[StageTask]) -> list[Any]:
        self.given.append(len(tasks))
        return super().run(tasks)


def dataset(*partitions: list[Any]) -> Lineage:
    return Lineage(LoadedParts(tuple(partial(iter, ones) for ones in partitions)), ())


def test_every_action_of_nothing_one_and_several_partitions() -> None:
    """Partitions without an element count for nothing, wherever they are."""
    for partitions in ([], [[]], [[1]], [[], [1, 2], [], [3]], [[3, 1], [2]]):
        items = [item for ones in partitions for item in ones]
        actions, data = Actions(InProcess()), dataset(*partitions)

        assert actions.collect(data) == items
        assert actions.count(data) == len(items)
        assert actions.reduce(data, max, "reduce 1") == max(items, default=None)
        assert actions.fold(data, operator.add, 10, None, "fold 1") == 10 + sum(items)
        assert actions.fold(data, lambda n, _: n + 1, 0, operator.add, "fold 1") == len(items)


def test_a_fold_goes_from_partition_to_partition_unless_its_states_are_combined() -> None:
    """Without `combine` one task at a time, in order; with it all at once, and then in order."""
    data, in_turn, at_once = dataset([1, 2], [3], [4]), Recording(), Recording()

    assert Actions(in_turn).fold(data, lambda text, x: f"{text}{x}", ">", None, "fold 1") == ">1234"
    assert in_turn.given == [1, 1, 1]
    assert Actions(at_once).fold(data, lambda text, x: f"{text}{x}", ">", operator.add, "fold 1") == ">>12>3>4"
    assert at_once.given == [3]


def test_an_error_in_the_script_names_no_partition() -> None:
    """`reduce` over partitions and `combine` run where the script runs."""
    data, actions = dataset([1], [0]), Actions(InProcess())
    with pytest.raises(FunctionFailed) as reduced:
        actions.reduce(data, operator.floordiv, "reduce 1")
    with pytest.raises(FunctionFailed, match="fold 1: combine failed") as folded:
        actions.fold(data, operator.add, 0, operator.floordiv, "fold 1")

    assert (reduced.value.partition, folded.value.partition) == (-1, -1)


def test_a_saved_data_set_is_whole_or_not_there(tmp_path: Path) -> None:
    """The number of its elements is returned."""
    actions = Actions(InProcess())
    assert actions.save(dataset(["a", "b"], [], ["c"]), tmp_path / "out", "text") == 3
    with pytest.raises(SinkFailed):
        actions.save(dataset(["a"], [3]), tmp_path / "other", "text")

    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert len(list((tmp_path / "out").iterdir())) == 3
