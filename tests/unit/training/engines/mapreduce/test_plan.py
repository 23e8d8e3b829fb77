"""From a data set to tasks: what is computed before what, how often, and in which order."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import pytest

from training.engines.mapreduce import stages
from training.engines.mapreduce.backends import InProcess, StageTask
from training.engines.mapreduce.plan import (
    AppliedFunction,
    ExchangedPairs,
    JoinedPairs,
    Lineage,
    LoadedParts,
    PlannedPartition,
    Planner,
    UnitedPartitions,
)
from training.engines.mapreduce.stages import Transformation


class Recording(InProcess):
    """Notes the names of the tasks that are given at once."""

    def __init__(self) -> None:
        self.given: list[list[str]] = []

    def run(self, tasks: list[StageTask]) -> list[Any]:
        self.given.append([task.name for task in tasks])
        return super().run(tasks)


def loaded(*partitions: list[Any], depth: int = 0) -> Lineage:
    return Lineage(LoadedParts(tuple(partial(iter, ones) for ones in partitions), depth), ())


def behind(data: Lineage, function: Any, kind: Any = "map") -> Lineage:
    return Lineage(data.origin, (*data.operations, Transformation(kind, "map 1", function)))


def computed(ready: list[PlannedPartition]) -> list[list[Any]]:
    return [list(stages.elements(one.stage, one.inputs)) for one in ready]


PAIRS = loaded([("a", 1), ("b", 2)], [("a", 3)])


def test_the_operations_behind_a_source_are_one_stage() -> None:
    """Nothing is computed to plan them, and each partition knows its number and whether its result leaves."""
    backend = Recording()
    ready = Planner(backend).ready(behind(loaded([1, 2], [3]), lambda x: 10 * x))
    assert computed(ready) == [[10, 20], [30]]
    assert [(one.stage.partition, one.stage.is_remote) for one in ready] == [(0, False), (1, False)]
    assert backend.given == []


def test_united_partitions_are_those_of_all_in_their_order() -> None:
    """Each with the operations of its own data set, and then those behind the union."""
    origin = UnitedPartitions((behind(loaded([1], [2]), str), loaded([3])))
    united = behind(Lineage(origin, ()), lambda x: (x,))
    assert computed(Planner(Recording()).ready(united)) == [[("1",)], [("2",)], [(3,)]]
    assert origin.partitions == 3


def test_pairs_are_exchanged_once_for_all_partitions() -> None:
    """One task for each partition of the source; a key is in one partition, with its values in the source's order."""
    backend = Recording()
    origin = ExchangedPairs(PAIRS, 3, "shuffle 1", None)
    found = computed(Planner(backend).ready(Lineage(origin, ())))
    assert backend.given == [["shuffle 1", "shuffle 1"]]
    assert len(found) == origin.partitions == 3
    assert sorted(pair for ones in found for pair in ones) == [("a", 1), ("a", 3), ("b", 2)]
    (of_a,) = [ones for ones in found if ("a", 1) in ones]
    assert [pair for pair in of_a if pair[0] == "a"] == [("a", 1), ("a", 3)]


def test_values_of_a_key_are_combined_on_both_sides_of_the_exchange() -> None:
    """So a partition sends one value for each key."""
    source = loaded([("a", 1), ("b", 2), ("a", 10)], [("a", 3)])
    planner = Planner(Recording())
    ready = planner.ready(Lineage(ExchangedPairs(source, 1, "reduce_by_key 1", operator.add), ()))
    assert [sorted(ones) for ones in computed(ready)] == [[("a", 14), ("b", 2)]]
    ((sent_by_first, sent_by_second),) = ready[0].inputs
    assert sorted(stages.decoded(sent_by_first)) == [("a", 11), ("b", 2)]
    assert list(stages.decoded(sent_by_second)) == [("a", 3)]


def test_an_exchange_that_two_data_sets_share_is_computed_once_for_an_action() -> None:
    """Another action computes it anew."""
    backend = Recording()
    shared = Lineage(ExchangedPairs(PAIRS, 2, "shuffle 1", None), ())
    both = Lineage(UnitedPartitions((behind(shared, str), behind(shared, repr))), ())
    planner = Planner(backend)
    assert len(computed(planner.ready(both))) == 4
    assert backend.given == [["shuffle 1", "shuffle 1"]]
    Planner(backend).ready(both)
    assert len(backend.given) == 2


def test_a_data_set_joined_with_itself_has_both_sides() -> None:
    """Each side is exchanged on its own."""
    backend = Recording()
    found = computed(Planner(backend).ready(Lineage(JoinedPairs(PAIRS, PAIRS, 2, "join 1"), ())))
    assert sorted(pair for ones in found for pair in ones) == [
        ("a", (1, 1)), ("a", (1, 3)), ("a", (3, 1)), ("a", (3, 3)), ("b", (2, 2)),
    ]  # fmt: skip
    assert backend.given == [["join 1"] * 2] * 2


def test_the_deepest_exchange_comes_first() -> None:
    """What a later one needs is there when its tasks are made."""
    backend = Recording()
    first = Lineage(ExchangedPairs(PAIRS, 3, "shuffle 1", None), ())
    second = Lineage(ExchangedPairs(first, 1, "reduce_by_key 2", operator.add), ())
    assert [sorted(ones) for ones in computed(Planner(backend).ready(second))] == [[("a", 4), ("b", 2)]]
    assert backend.given == [["shuffle 1"] * 2, ["reduce_by_key 2"] * 3]


def test_a_function_of_several_data_sets_runs_once_for_all_its_outputs() -> None:
    """Partition by partition, with the elements of each in lists."""
    backend = Recording()
    calls: list[Any] = []

    def both(lists: list[list[int]]) -> list[list[int]]:
        calls.append(lists)
        return [lists[0] + lists[1], [len(lists[0])]]

    whole = AppliedFunction((loaded([1], [2, 3]), loaded([4], [5])), 2, "apply 1", both)
    planner = Planner(backend)
    assert computed(planner.ready(Lineage(whole.output(0), ()))) == [[1, 4], [2, 3, 5]]
    assert computed(planner.ready(Lineage(whole.output(1), ()))) == [[1], [2]]
    assert sorted(calls) == [[[1], [4]], [[2, 3], [5]]]
    assert backend.given == [["apply 1", "apply 1"]]
    assert whole.output(1).partitions == 2


def test_depth_numbers_the_operations_behind_the_longest_way() -> None:
    """Every origin that has a data set before it is one deeper than that."""
    short, long = loaded([1]), behind(behind(loaded([1], depth=2), str), str)
    assert (short.depth, long.depth) == (0, 4)
    function = AppliedFunction((short, long), 1, "apply 1", list)
    for origin in (
        UnitedPartitions((short, long)),
        JoinedPairs(short, long, 1, "join 1"),
        JoinedPairs(long, short, 1, "join 1"),
        ExchangedPairs(long, 1, "shuffle 1", None),
        function.output(0),
    ):
        assert Lineage(origin, ()).depth == 5
        assert behind(Lineage(origin, ()), str).depth == 6


def test_an_unknown_origin_is_a_type_error() -> None:
    """It names what it was."""
    origin: Any = "somewhere"
    with pytest.raises(TypeError, match="somewhere"):
        Planner(Recording()).ready(Lineage(origin, ()))
