"""The engine itself: how elements are cut into partitions, values that all tasks read, and where functions run."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pnode.training.engines.mapreduce import engine as module
from p2pnode.training.engines.mapreduce.backends import Backend
from p2pnode.training.engines.mapreduce.engine import MAX_RECEIVED, BroadcastValue, MapReduce
from p2pnode.training.engines.mapreduce.errors import SHOWN_CHARS, FunctionFailed, function_failed, shown
from p2pnode.training.engines.mapreduce.stages import bucket_of
from tests.harness.project.repository import ROOT


@pytest.fixture
def engine() -> Iterator[MapReduce]:
    with MapReduce() as made:
        yield made


@pytest.fixture
def remote(engine: MapReduce) -> MapReduce:
    """An engine whose results leave the process, without one."""

    class Remote(Backend):
        is_remote = True

        def workers(self) -> int:
            return 4

    backend: Any = Remote()
    engine._backend = backend
    return engine


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_received", {})


def sizes(data: Any) -> list[int]:
    return list(data.map_partition(lambda items: [len(items)]).collect())


@pytest.mark.parametrize(
    ("items", "partitions", "cut"),
    [(10, 3, [3, 3, 4]), (2, 4, [0, 1, 0, 1]), (4, 4, [1, 1, 1, 1]), (0, 2, [0, 0]), (5, 1, [5])],
)
def test_elements_are_cut_into_equal_partitions(engine: MapReduce, items: int, partitions: int, cut: list[int]) -> None:
    """They differ by one element at most, and the order stays."""
    data = engine.from_items(range(items), partitions)
    assert sizes(data) == cut
    assert data.collect() == list(range(items))


def test_without_a_number_there_is_a_partition_for_each_worker(engine: MapReduce, remote: MapReduce) -> None:
    """No more than there are elements, and one for none."""
    assert [len(sizes(remote.from_items(range(count)))) for count in (9, 4, 2, 0)] == [4, 4, 2, 1]


def test_a_broadcast_value_is_decoded_once_in_each_process(remote: MapReduce) -> None:
    """However many tasks bring it; it is encoded once, too."""
    handle = remote.broadcast({"k": [1, 2]})
    payload = handle._payload
    assert payload is not None
    first, second = (pickle.loads(cloudpickle.dumps(handle)) for _ in range(2))
    assert handle._payload is payload
    assert first is second
    assert first is not handle
    assert MapReduce.get_value(first) == first.value == {"k": [1, 2]}


def test_a_process_keeps_so_many_broadcast_values(remote: MapReduce) -> None:
    """The oldest go first; one that is gone is decoded again."""
    encoded = [cloudpickle.dumps(BroadcastValue(number)) for number in range(MAX_RECEIVED + 1)]
    received = [pickle.loads(one) for one in encoded]
    assert len(module._received) == MAX_RECEIVED
    assert pickle.loads(encoded[-1]) is received[-1]
    assert pickle.loads(encoded[1]) is received[1]
    again = pickle.loads(encoded[0])
    assert again is not received[0]
    assert again.value == 0


def test_functions_know_where_they_run(engine: MapReduce) -> None:
    """Host and process; the engine ends its processes when its block ends."""
    assert engine.from_items([0]).map(lambda _: MapReduce.myself()).collect() == [
        f"{os.uname().nodename}:{os.getpid()}"
    ]
    closed: list[str] = []
    with MapReduce() as other:
        other._backend.close = lambda: closed.append("closed")  # type: ignore[method-assign]
    assert closed == ["closed"]


# -- the errors of map-reduce


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


# -- buckets of keys


KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)


@given(KEYS, KEYS)
def test_equal_keys_have_one_bucket(one: object, other: object) -> None:
    """Keys that a dict takes for one go to one bucket."""
    if one == other:
        assert bucket_of(one, 1 << 30) == bucket_of(other, 1 << 30)


@pytest.mark.parametrize(
    "same", [(1, 1.0, True, np.int64(1)), (0, -0.0, False), (0.5, np.float64(0.5)), (10**20, 1e20)]
)
def test_numbers_that_are_equal_are_one_key(same: tuple[object, ...]) -> None:
    """1, 1.0 and True are one key in Python, so they are here."""
    assert len({bucket_of(key, 1 << 30) for key in same}) == 1


def test_keys_spread_over_all_buckets() -> None:
    """Ten thousand words give no bucket twice its share."""
    counts = [0] * 16
    for number in range(10_000):
        counts[bucket_of(f"word-{number}", 16)] += 1

    assert max(counts) < 2 * 10_000 / 16
    assert min(counts) > 10_000 / 16 / 2


def test_a_bucket_is_the_same_in_every_process() -> None:
    """Python's own hash of a string differs between processes; the bucket does not."""
    code = "from p2pnode.training.engines.mapreduce.stages import bucket_of; print(bucket_of(('a', 1, None), 1 << 30))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }

    assert found == {f"{bucket_of(('a', 1, None), 1 << 30)}\n"}
