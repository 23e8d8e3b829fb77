"""How long a step waits: pure decisions over shards, bytes and times."""

from __future__ import annotations

from training.exchange.client.step_wait import LEAST_BYTES_PER_S, Patience


def test_what_is_silent_from_the_beginning_ends_at_the_limit() -> None:
    """One dead node does not hold the step longer, however long the others moved."""
    patience = Patience(5.0, 100.0)
    assert patience.left_s([1, 2], 103.0) == 2.0
    patience.note([1], 108.0)
    assert patience.left_s([1, 2], 108.0) == 5.0
    assert patience.left_s([2], 108.0) == 0.0


def test_bytes_move_all_shards_of_their_transfer() -> None:
    """Those behind the shard that is being sent wait for their turn; shards of other transfers do not profit."""
    patience = Patience(5.0, 0.0)
    patience.note_bytes("a", [1, 2], 1000, 4.0)
    assert patience.left_s([2], 6.0) == 3.0
    assert patience.left_s([3], 6.0) == 0.0


def test_bytes_that_are_sent_again_are_no_progress() -> None:
    """A stopped process takes the same few bytes of every attempt; more than ever before is progress."""
    patience = Patience(5.0, 0.0)
    patience.note_bytes("a", [1], 1000, 1.0)
    for attempt in range(2, 12):
        patience.note_bytes("a", [1], 1000, float(attempt))
    assert patience.left_s([1], 6.0) == 0.0
    patience.note_bytes("a", [1], 1600, 6.0)
    assert patience.left_s([1], 6.0) == 5.0
    # Another owner of the same shard begins at its own first byte.
    patience.note_bytes("b", [1], 200, 8.0)
    assert patience.left_s([1], 8.0) == 5.0


def test_a_few_bytes_a_second_are_no_progress() -> None:
    """Who sends no more does so to hold others up. They count together, where enough have come at last."""
    patience = Patience(5.0, 0.0)
    for second in range(1, 6):
        patience.note_bytes("a", [1], int(0.9 * LEAST_BYTES_PER_S * second), float(second))
    assert patience.left_s([1], 5.0) == 0.0
    patience.note_bytes("a", [1], int(1.1 * LEAST_BYTES_PER_S * 5), 5.0)
    assert patience.left_s([1], 5.0) == 5.0


def test_nothing_awaited_is_over_after_the_limit() -> None:
    """The caller that still waits then waits for something else."""
    assert Patience(5.0, 0.0).left_s([], 5.0) == 0.0


def test_what_is_left_by_rounding_is_nothing() -> None:
    """A timer for it would not move the clock, and the wait would look again without end."""
    assert Patience(5.0, 0.1).left_s([1], 5.1 - 1e-15) == 0.0
