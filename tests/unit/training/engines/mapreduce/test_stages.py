"""One task on one partition: what `test_dataset` does not see of it."""

from __future__ import annotations

import threading

import pytest

from p2pnode.training.engines.mapreduce import stages
from p2pnode.training.engines.mapreduce.errors import BadRequest, NotEncodable
from p2pnode.training.engines.mapreduce.stages import Stage, Transformation


def stage_of(*operations: Transformation, is_remote: bool = False) -> Stage:
    return Stage(iter, operations, 3, is_remote)


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
