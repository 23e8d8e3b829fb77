"""One task on one partition: operations, blocks between tasks, pairs by key, and errors that name the element."""

from __future__ import annotations

import operator
import threading
from typing import Any

import pytest

from training.engines.mapreduce import stages
from training.engines.mapreduce.errors import BadRequest, FunctionFailed, NotEncodable
from training.engines.mapreduce.stages import Stage, Transformation, bucket_of


def stage_of(*operations: Transformation, is_remote: bool = False) -> Stage:
    return Stage(iter, operations, 3, is_remote)


def only(kind: Any, function: Any) -> Stage:
    return stage_of(Transformation(kind, f"{kind} 1", function))


def test_operations_follow_each_other_element_by_element() -> None:
    """Nothing is computed before it is asked for, and no element waits for the next."""
    seen: list[int] = []
    stage = stage_of(
        Transformation("map", "map 1", lambda x: (seen.append(x), x * 2)[1]),
        Transformation("filter", "filter 2", lambda x: x != 2),
        Transformation("flatmap", "flatmap 3", lambda x: [x, -x]),
        Transformation("flatten", "flatten 4", None),
    )
    lists = stage_of(Transformation("flatten", "flatten 1", None))

    found = stages.elements(stage._replace(operations=stage.operations[:3]), [[0, 1, 2]])
    assert seen == []
    assert next(found) == 0
    assert seen == [0]
    assert list(found) == [0, 4, -4]
    assert list(stages.elements(lists, [[[1, 2], [], "ab"]])) == [1, 2, "a", "b"]
    assert list(stages.elements(stage_of(), [[]])) == []


def test_a_partition_is_given_as_a_list_once() -> None:
    """Also an empty one."""
    stage = only("map_partition", lambda items: [len(items)])

    assert list(stages.elements(stage, [[1, 2]])) == [2]
    assert list(stages.elements(stage, [[]])) == [0]


@pytest.mark.parametrize("kind", ["map", "filter", "flatmap", "map_partition"])
def test_an_error_names_operation_element_and_partition(kind: str) -> None:
    """Of a partition that is given as a whole it says how many there were."""
    stage = only(kind, lambda x: 1 // (x if isinstance(x, int) else 0))
    with pytest.raises(FunctionFailed) as failed:
        list(stages.elements(stage, [[1, 0]] if kind != "flatmap" else [[0]]))

    assert (failed.value.operation, failed.value.partition) == (f"{kind} 1", 3)
    assert failed.value.element == ("all 2 elements" if kind == "map_partition" else "0")


def test_a_block_stays_a_list_unless_it_leaves_the_process() -> None:
    """Both kinds give their elements; blocks of one stage are read one after the other."""
    here = stages.encoded(iter([1, 2]), stage_of())
    there = stages.encoded(iter([3]), stage_of(is_remote=True))

    assert here == [1, 2]
    assert isinstance(there, bytes)
    assert list(stages.decoded(there)) == [3]
    assert list(stages.chained([here, there, stages.encoded([], stage_of(is_remote=True))])) == [1, 2, 3]


def test_what_cannot_be_sent_is_named() -> None:
    """The first such element, and the operation that made it; without one the source."""
    lock = threading.Lock()
    made = stage_of(Transformation("map", "map 1 (made)", None), is_remote=True)
    with pytest.raises(NotEncodable, match=r"map 1 \(made\): <unlocked .* cannot be sent"):
        stages.encoded([1, lock], made)
    with pytest.raises(NotEncodable, match="the source: "):
        stages.encoded([lock], stage_of(is_remote=True))
    assert stages.encoded([lock], stage_of()) == [lock]


def test_an_operation_is_called_by_kind_place_and_function() -> None:
    """A lambda is called so, an object by its type, and none where there is none."""

    class Callable:
        def __call__(self) -> None: ...

    assert stages.named("map", 2, len) == "map 2 (len)"
    assert stages.named("map", 1, lambda: 0) == "map 1 (<lambda>)"
    assert stages.named("filter", 3, Callable()) == "filter 3 (Callable)"
    assert stages.named("flatten", 1, None) == "flatten 1"


@pytest.mark.parametrize("wrong", [3, "ab", (1,), (1, 2, 3), {1: 2, 3: 4}])
def test_what_is_no_pair_is_refused(wrong: object) -> None:
    """The error names who needs pairs, and the element. Lists of two are pairs."""
    assert list(stages.pairs([(1, 2), [3, 4]], "shuffle 1")) == [(1, 2), (3, 4)]
    with pytest.raises(BadRequest, match="shuffle 1 needs pairs"):
        list(stages.pairs([(1, 2), wrong], "shuffle 1"))


def test_values_of_a_key_are_combined_in_their_order() -> None:
    """One value is given on as it is; keys keep the order in which they came first."""
    items = [("b", "1"), ("a", "2"), ("b", "3"), ("b", "4")]

    assert list(stages.combined(items, operator.add, "x", 0).items()) == [("b", "134"), ("a", "2")]
    assert stages.combined([], operator.add, "x", 0) == {}
    assert list(stages.merged([items[:1], items[1:]], operator.add, "x", 0)) == [("b", "134"), ("a", "2")]
    with pytest.raises(BadRequest, match=r"x: \[1\] is no key"):
        stages.combined([([1], 2)], operator.add, "x", 0)
    with pytest.raises(FunctionFailed, match="key 'b'"):
        stages.combined([("b", 1), ("b", None)], operator.add, "x", 0)


def test_a_join_has_every_pair_of_values_of_a_key() -> None:
    """Left before right; keys of one side alone have none."""
    left, right = [[("a", 1), ("b", 2)], [("a", 3)]], [[("a", "x"), ("a", "y"), ("c", "z")]]

    assert list(stages.joined(left, right)) == [
        ("a", (1, "x")),
        ("a", (1, "y")),
        ("a", (3, "x")),
        ("a", (3, "y")),
    ]
    assert list(stages.joined([], right)) == list(stages.joined(left, [])) == []


def test_pairs_go_to_the_buckets_of_their_keys() -> None:
    """There are as many buckets as asked, empty ones too; with a function those of a key are combined before."""
    items = [(number % 5, number) for number in range(20)]

    buckets = stages.split([items], stage_of(), 3, "shuffle 1", None)
    assert [[key for key, _ in ones if bucket_of(key, 3) != place] for place, ones in enumerate(buckets)] == [[]] * 3
    assert sorted(pair for ones in buckets for pair in ones) == sorted(items)

    fewer = stages.split([items], stage_of(), 3, "reduce_by_key 1", operator.add)
    assert sorted(pair for ones in fewer for pair in ones) == [(key, 4 * key + 30) for key in range(5)]
    assert stages.split([[]], stage_of(), 2, "shuffle 1", None) == ([], [])


def test_a_function_of_several_data_sets_gives_as_many_lists_as_announced() -> None:
    """Otherwise the error says both numbers; what it raises is named with how many elements it had."""
    both = [stage_of(), stage_of()]

    assert stages.applied([[[1, 2]], [[3]]], both, 2, "apply 1", lambda given: (given[1], given[0])) == ([3], [1, 2])
    with pytest.raises(BadRequest, match="apply 1 returned 1 lists, and outputs=2 was given"):
        stages.applied([[[1]], [[2]]], both, 2, "apply 1", lambda given: [[1]])
    with pytest.raises(FunctionFailed, match="all 3 elements of partition 3"):
        stages.applied([[[1, 2]], [[3]]], both, 2, "apply 1", lambda given: 1 // 0)


def test_the_ends_of_a_stage() -> None:
    """Nothing, one and several elements; a fold begins with the value before it, a reduction with its first element."""
    for items, total in (([], []), ([4], [4]), ([4, 5, 6], [15])):
        assert stages.collect([items], stage_of()) == items
        assert stages.count([items], stage_of()) == len(items)
        assert stages.reduce([items], stage_of(), operator.add, "reduce 1") == total
        assert stages.fold(([100], [items]), stage_of(), operator.add, "fold 1") == [100 + sum(items)]
        assert stages.write([items], stage_of(), lambda ones, partition: len(list(ones)) * 10 + partition) == (
            len(items) * 10 + 3
        )
    with pytest.raises(FunctionFailed, match="reduce 1 failed for 0 of partition 3"):
        stages.reduce([[1, 0]], stage_of(), operator.floordiv, "reduce 1")
    with pytest.raises(FunctionFailed, match="fold 1 failed for 0 of partition 3"):
        stages.fold(([1], [[0]]), stage_of(), operator.floordiv, "fold 1")
