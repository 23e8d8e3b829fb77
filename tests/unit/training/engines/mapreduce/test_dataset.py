"""Map-reduce's transformations and actions, in one process and in two."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from p2pnode.training.engines.mapreduce.engine import MapReduce
from p2pnode.training.engines.mapreduce.errors import BadRequest, FunctionFailed, NotEncodable

#: Made of an engine: what an action returns, and what it must be for the elements 0 to 9.
CASES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "map": (lambda d: d.map(lambda x: x * x).collect(), [x * x for x in range(10)]),
    "filter": (lambda d: d.filter(lambda x: x % 3 == 0).collect(), [0, 3, 6, 9]),
    "flatmap": (lambda d: d.flatmap(lambda x: [x] * (x % 3)).collect(), [1, 2, 2, 4, 5, 5, 7, 8, 8]),
    "flatten": (lambda d: d.map(lambda x: [x, -x]).flatten().map(abs).reduce(operator.add), 90),
    "map_partition": (lambda d: d.map_partition(lambda xs: [sum(xs)]).reduce(operator.add), 45),
    "union": (lambda d: d.union(d.map(str), d).count(), 30),
    "reduce": (lambda d: d.reduce(max), 9),
    "fold": (lambda d: d.fold(lambda text, x: text + str(x), ">"), ">0123456789"),
    "fold and combine": (lambda d: d.fold(lambda n, _: n + 1, 0, combine=operator.add), 10),
    "count": (lambda d: d.count(), 10),
    "shuffle": (
        lambda d: sorted(d.map(lambda x: (x % 3, x)).shuffle().collect()),
        sorted((x % 3, x) for x in range(10)),
    ),
    "reduce_by_key": (
        lambda d: sorted(d.map(lambda x: (x % 3, x)).reduce_by_key(operator.add).collect()),
        [(0, 18), (1, 12), (2, 15)],
    ),
    "join": (
        lambda d: sorted(
            d.map(lambda x: (x % 5, x)).join(d.filter(lambda x: x < 2).map(lambda x: (x, str(x)))).collect()
        ),
        [(0, (0, "0")), (0, (5, "0")), (1, (1, "1")), (1, (6, "1"))],
    ),
}
EMPTY: dict[str, Any] = {"reduce": None, "fold": ">", "fold and combine": 0, "count": 0, "union": 0}
EMPTY |= {"flatten": None, "map_partition": 0}


@pytest.fixture(scope="module", params=[0, 2], ids=["in process", "two processes"])
def engine(request: pytest.FixtureRequest) -> Iterator[MapReduce]:
    with MapReduce(processes=request.param) as made:
        yield made


@pytest.mark.parametrize("partitions", [1, 3, 14])
@pytest.mark.parametrize("case", CASES)
def test_each_function_means_the_same_in_any_partition(engine: MapReduce, case: str, partitions: int) -> None:
    """Every transformation and action gives what plain Python gives, in one, some and more partitions than elements."""
    action, expected = CASES[case]

    assert action(engine.from_items(range(10), partitions)) == expected


@pytest.mark.parametrize("case", CASES)
def test_each_function_takes_an_empty_data_set(engine: MapReduce, case: str) -> None:
    """Nothing becomes nothing, None, or the initial value."""
    assert CASES[case][0](engine.from_items([], 2)) == EMPTY.get(case, [])


def test_what_a_function_returns_keeps_the_order_of_the_elements(engine: MapReduce) -> None:
    """Elements come partition after partition; a key comes where its bucket first met it."""
    data = engine.from_items(["the", "cat", "and", "the", "dog", "and", "the", "bird"], 3)
    counted = data.map(lambda word: (word, 1)).reduce_by_key(operator.add, partitions=1).collect()

    assert counted == list(Counter(["the", "cat", "and", "the", "dog", "and", "the", "bird"]).items())


def test_the_initial_value_of_a_fold_is_applied_once(engine: MapReduce) -> None:
    """Five partitions do not add it five times."""
    assert engine.from_items(range(10), 5).fold(operator.add, 1000) == 1045


def test_a_join_keeps_its_sides_apart_and_has_all_pairs(engine: MapReduce) -> None:
    """The left value is on the left, also where both sides have one type; keys of one side alone are left out."""
    left = engine.from_items([("a", 1), ("a", 2), ("b", 3)], 2)
    right = engine.from_items([("a", 10), ("c", 30), ("a", 20)], 3)

    assert sorted(left.join(right).collect()) == [("a", (1, 10)), ("a", (1, 20)), ("a", (2, 10)), ("a", (2, 20))]
    assert left.join(left).count() == 5


def test_pairs_of_one_key_share_a_partition_after_a_shuffle(engine: MapReduce) -> None:
    """Each partition has whole keys, and all pairs are there."""
    pairs = [(key, number) for number in range(40) for key in ("x", b"x", 1, 1.5, None, ("a", 2))]
    shuffled = engine.from_items(pairs, 5).shuffle(4)
    keys = shuffled.map_partition(lambda ones: [sorted({repr(key) for key, _ in ones})]).collect()

    assert shuffled.partitions == 4
    assert sorted(key for ones in keys for key in ones) == sorted(
        repr(key) for key in ("x", b"x", 1, 1.5, None, ("a", 2))
    )
    assert sorted(shuffled.map(repr).collect()) == sorted(map(repr, pairs))


def test_apply_gives_one_data_set_per_output(engine: MapReduce) -> None:
    """The function sees the same partition of each input; each output has as many partitions."""
    numbers, words = engine.from_items(range(6), 3), engine.from_items("abcdef", 3)
    sums, pairs = engine.apply(lambda given: [[sum(given[0])], zip(*given, strict=True)], [numbers, words], outputs=2)

    assert sums.collect() == [1, 5, 9]
    assert pairs.collect() == list(enumerate("abcdef"))
    assert pairs.partitions == 3


def test_a_broadcast_value_is_read_in_every_process(engine: MapReduce) -> None:
    """A function reads it by `value`, the script by `get_value`."""
    stop = engine.broadcast({"and", "the"})
    kept = engine.from_items(["the", "cat", "and", "dog"], 2).filter(lambda word: word not in stop.value)

    assert kept.collect() == ["cat", "dog"]
    assert engine.get_value(stop) == {"and", "the"}


@pytest.mark.parametrize(
    ("of", "named"),
    [
        (lambda d: d.map(lambda x: 1 // (x - 7)).collect(), "map 1"),
        (lambda d: d.map(str).filter(lambda x: 1 // (int(x) - 7)).count(), "filter 2"),
        (lambda d: d.flatmap(lambda x: range(1 // (x - 7))).count(), "flatmap 1"),
        (lambda d: d.map_partition(lambda xs: [1 // (x - 7) for x in xs]).count(), "map_partition 1"),
        (lambda d: d.reduce(lambda a, b: a + 1 // (b - 7)), "reduce 1"),
        (lambda d: d.fold(lambda a, b: a + 1 // (b - 7), 0), "fold 1"),
        (lambda d: d.map(lambda x: ("k", x)).reduce_by_key(lambda a, b: a + 1 // (b - 7)).count(), "reduce_by_key 2"),
    ],
)
def test_an_error_in_a_function_names_operation_element_and_process(
    engine: MapReduce, of: Callable[[Any], Any], named: str
) -> None:
    """The error says which call, at which element, in which partition and process; then the engine goes on."""
    data = engine.from_items(range(10), 3)
    with pytest.raises(FunctionFailed) as failed:
        of(data)

    assert failed.value.operation.startswith(named)
    assert "7" in failed.value.element or "all 4 elements" in failed.value.element
    assert "process " in failed.value.node
    assert "ZeroDivisionError" in str(failed.value)
    assert "Traceback" in failed.value.cause
    assert data.count() == 10


def test_apply_takes_nothing_and_one_partition_and_names_what_raises(engine: MapReduce) -> None:
    """Lists of empty partitions are empty lists; an error names the partition, and the engine goes on."""

    def turned(lists: list[list[int]]) -> list[list[int]]:
        return [[1 // (x - 7) for x in lists[0]][::-1]]

    assert engine.apply(turned, [engine.from_items([], 2)])[0].collect() == []
    assert engine.apply(turned, [engine.from_items([8, 6], 1)])[0].collect() == [-1, 1]
    data = engine.from_items(range(10), 3)
    with pytest.raises(FunctionFailed, match=r"apply 1 \(turned\) failed for all 4 elements of partition 2 on"):
        engine.apply(turned, [data])[0].collect()

    assert data.count() == 10


def test_what_cannot_be_sent_is_named_and_the_engine_goes_on() -> None:
    """A value, a function and a broadcast that no other process can have: an error that names them, not a hang."""
    with MapReduce(processes=1) as engine:
        data = engine.from_items(range(4), 2)
        lock = __import__("threading").Lock()
        with pytest.raises(NotEncodable, match=r"map 1 \(<lambda>\).*generator"):
            data.map(lambda x: (y for y in [x])).collect()
        with pytest.raises(NotEncodable, match="a function"):
            data.map(lambda x: (lock, x)).collect()
        with pytest.raises(NotEncodable, match="from_items"):
            engine.from_items([lock])
        with pytest.raises(NotEncodable, match="broadcast"):
            engine.broadcast(lock)
        assert data.count() == 4


def test_a_diamond_is_computed_once() -> None:
    """Both sides of a join come from one shuffle: it runs once, and so does what is before it."""
    calls: list[int] = []
    with MapReduce() as engine:
        shuffled = engine.from_items(range(6), 2).map(lambda x: (calls.append(x), (x % 2, x))[1]).shuffle(2)
        assert shuffled.join(shuffled.map(lambda pair: (pair[0], str(pair[1])))).count() == 18

    assert sorted(calls) == list(range(6))


def test_nothing_runs_before_an_action_and_no_element_waits_for_the_next() -> None:
    """Transformations are lazy, and a partition is never held between two of them."""
    seen: list[str] = []
    with MapReduce() as engine:
        twice = engine.from_items([0, 1], 1).map(lambda x: (seen.append(f"map {x}"), x)[1])
        assert twice.filter(lambda x: (seen.append(f"filter {x}"), True)[1]).count() == 2
        assert seen == ["map 0", "filter 0", "map 1", "filter 1"]
        lazy = engine.from_items([1]).map(lambda _: 1 // 0).map(lambda x: (x, x)).reduce_by_key(max).shuffle()
        with pytest.raises(FunctionFailed):
            lazy.count()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda e: e.from_items([1]).map(3), "map needs a function, not 3"),
        (lambda e: e.from_items([[1]]).flatmap(None), "flatmap needs a function"),
        (lambda e: e.from_items([1]).filter(None), "filter needs a function"),
        (lambda e: e.from_items([(1, 2)]).reduce_by_key(None), "reduce_by_key needs a function"),
        (lambda e: e.from_items([1]).reduce(None), "reduce needs a function"),
        (lambda e: e.from_items([1]).fold(None, 0), "fold needs a function"),
        (lambda e: e.from_items([1]).fold(max, 0, 1), "combine of fold needs a function"),
        (lambda e: e.apply(None, [e.from_items([1])]), "apply needs a function"),
        (lambda e: e.apply(list, [[1]]), r"apply needs data sets, not \[1\]"),
        (lambda e: e.from_items([(1, 2)]).join([(1, 3)]), r"\[\(1, 3\)\] is no data set of this engine: make one"),
        (lambda e: e.get_value(3), "what broadcast returned, not 3"),
        (lambda e: e.from_items([1], 0), "partitions=0"),
        (lambda e: e.from_items([1, 2]).shuffle().collect(), "needs pairs.*there is [12]"),
        (lambda e: e.from_items([([1], 2)]).reduce_by_key(max).collect(), "cannot be hashed"),
        (lambda e: e.from_items([(float("nan"), 2)]).shuffle().collect(), "nan is no key"),
        (lambda e: e.from_items([(frozenset(), 2)]).shuffle().collect(), "of type frozenset is no key"),
        (lambda e: e.from_items([(1, 2)]).shuffle(0), "partitions=0"),
        (lambda e: e.from_items([1]).union(MapReduce().from_items([2])), "no data set of this engine"),
        (
            lambda e: e.apply(list, [e.from_items([1], 1), e.from_items([1], 2)]),
            r"equally many partitions, not \[1, 2\]",
        ),
        (lambda e: e.apply(lambda _: [[1]], [e.from_items([1])], 2)[0].collect(), "returned 1 lists, and outputs=2"),
        (lambda e: MapReduce(processes=-1), "processes=-1"),
        (lambda e: MapReduce(processes=1, address="tcp://localhost:1"), "either processes"),
    ],
)
def test_a_wrong_argument_is_named(engine: MapReduce, wrong: Callable[[MapReduce], Any], message: str) -> None:
    """A request that cannot be met is refused with what was given."""
    with pytest.raises(BadRequest, match=message):
        wrong(engine)


def test_an_error_where_partitions_are_combined_names_no_partition(engine: MapReduce) -> None:
    """What the function of `combine` got is of all partitions; the engine goes on."""
    data = engine.from_items(range(10), 3)
    with pytest.raises(FunctionFailed, match=r"combine failed for \d+ on .*ZeroDivisionError"):
        data.fold(lambda n, _: n + 1, 0, combine=lambda a, b: a + 1 // (b - b))

    assert data.count() == 10
