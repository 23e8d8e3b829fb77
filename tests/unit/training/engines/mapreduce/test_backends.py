"""Where tasks run: the backend that a script asks for, and tasks in the calling thread. Processes and clusters:
tests/process/test_backends_cluster.py."""

from __future__ import annotations

import operator
import threading
from functools import partial
from typing import Any

import pytest

from p2pnode.training.engines.mapreduce.backends import InProcess, Processes, StageTask, make_backend
from p2pnode.training.engines.mapreduce.errors import BadRequest, FunctionFailed, NotEncodable


def task(function: Any, inputs: Any, name: str = "map 1") -> StageTask:
    return StageTask(function, inputs, name)


def test_the_backend_is_the_one_that_was_asked_for() -> None:
    """0 is this process, more are processes; processes and a cluster at once, or fewer than none, are refused."""
    assert isinstance(make_backend(0, None), InProcess)
    assert make_backend(0, None).workers() == 1
    processes = make_backend(3, None)
    assert isinstance(processes, Processes)
    assert (processes.workers(), processes.is_remote) == (3, True)
    processes.close()  # none was started
    with pytest.raises(BadRequest, match="processes=-1: use 0 for this process"):
        make_backend(-1, None)
    with pytest.raises(BadRequest, match="either processes of this machine, or the address"):
        make_backend(2, "tcp://127.0.0.1:1")


def test_results_have_the_order_of_the_tasks() -> None:
    """No task, one and several; inputs that look like the numbers of tasks are only inputs."""
    backend = InProcess()
    assert backend.run([]) == []
    handles = backend.run([task(operator.neg, 5), task(list, [0, 1]), task(partial(operator.add, 10), 0)])

    assert backend.values(handles) == [-5, [0, 1], 10]
    assert backend.pick((7, 8), 1) == 8
    backend.close()


def test_what_a_task_raises_is_raised() -> None:
    """As it is."""

    def fails(_: object) -> None:
        raise FunctionFailed("map 1", "3", 0, "here", "cause")

    with pytest.raises(FunctionFailed, match="map 1 failed for 3"):
        InProcess().run([task(fails, None)])


def test_a_function_that_cannot_be_sent_is_refused_before_a_process_starts() -> None:
    """The error names the operation."""
    lock = threading.Lock()
    backend = Processes(1)
    with pytest.raises(NotEncodable, match="map 1: a function, or what it refers to, cannot be sent"):
        backend.run([task(lambda _: lock, None)])

    assert backend._pool is None
