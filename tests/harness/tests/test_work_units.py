"""What a worker of `make test` takes at once, in which order, and what a crash leaves to the others."""

from __future__ import annotations

from tests.harness.runner.work_units import WorkQueue, units_of


def test_a_group_and_a_quick_module_are_units_and_begin_in_the_order_of_the_tests() -> None:
    """Tests of a group in several places are one unit, as are those of a module in tests/unit; others are alone."""
    tests = [
        ("tests/process/test_a.py::test_long", "swarms"),
        ("tests/simulated/test_b.py::test_one", None),
        ("tests/simulated/test_b.py::test_two", None),
        ("tests/unit/test_c.py::test_one", None),
        ("tests/unit/test_c.py::test_two[x::y]", None),
        ("tests/process/test_d.py::test_long", "swarms"),
        ("tests/unit/test_c.py::test_alone", "sources"),
        ("tests/unit/test_d.py::test_one", None),
    ]

    assert units_of(tests) == [[0, 5], [1], [2], [3, 4], [6], [7]]


def test_units_are_given_from_both_ends_until_none_is_left() -> None:
    """Each to one worker, and to the third one the last."""
    queue = WorkQueue([[0, 1], [2], [3], [4]])

    assert [queue.give(worker) for worker in (0, 2, 1, 0, 2)] == [[0, 1], [4], [2], [3], []]
    assert len(queue) == 0


def test_what_a_crashed_worker_had_left_is_given_first() -> None:
    """The test that ran has crashed with it; those that it had finished are not run again, the others are, at once."""
    queue = WorkQueue([[0, 1, 2, 3], [4]])
    queue.give(0)
    queue.finish(0, 0)

    assert queue.lose(0) == 1
    assert queue.give(1) == [2, 3]
    assert queue.give(1) == [4]


def test_a_worker_that_had_finished_everything_crashes_no_test() -> None:
    """Also one that was given nothing."""
    queue = WorkQueue([[0]])
    queue.give(0)
    queue.finish(0, 0)

    assert (queue.lose(0), queue.lose(1)) == (None, None)
