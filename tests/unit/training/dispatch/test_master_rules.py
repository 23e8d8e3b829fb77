"""Which of two masters goes on, and the order of a task's records."""

from __future__ import annotations

from training.dispatch.answers import Registration
from training.dispatch.master_rules import is_of, order_of, rank_of
from training.dispatch.messages import MasterRecord

LOW, HIGH = b"a" * 26, b"b" * 26


def test_the_later_epoch_wins_then_the_one_with_a_data_set_then_the_higher_id() -> None:
    """Both nodes come to the same decision."""
    records = [
        MasterRecord(LOW, 2, b""),
        MasterRecord(LOW, 1, b"q"),
        MasterRecord(HIGH, 1, b""),
        MasterRecord(LOW, 1, b""),
    ]

    assert sorted(records, key=rank_of, reverse=True) == records


def test_a_request_is_of_its_queue_alone() -> None:
    """None is before a data set is registered."""
    facts = Registration(identity=b"q", digest=b"", tasks=1, chunks_per_task=1, shuffle=True, seed=0)

    assert is_of(facts, b"q")
    assert not is_of(facts, b"p")
    assert not is_of(None, b"")


def test_orders_differ_by_pass_task_and_seed_and_are_never_that_of_the_files() -> None:
    """0 means the order of the files; the numbers fit a message."""
    orders = [order_of(seed, number, task) for seed in (0, 1) for number in (1, 2) for task in range(50)]

    assert len(set(orders)) == 200
    assert all(0 < order < 1 << 63 for order in orders)
