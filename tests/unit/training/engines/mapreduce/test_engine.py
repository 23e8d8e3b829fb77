"""The engine itself: how elements are cut into partitions, values that all tasks read, and where functions run."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest

from p2pnode.training.engines.mapreduce import engine as module
from p2pnode.training.engines.mapreduce.backends import Backend
from p2pnode.training.engines.mapreduce.engine import MAX_RECEIVED, BroadcastValue, MapReduce


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
