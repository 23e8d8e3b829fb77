"""What the identities in stored states show of earlier starts."""

from __future__ import annotations

from training.exchange.store.history import highest_step_of
from training.shards.applied import Applied, DeltaId

NODE, OTHER = b"n" * 20, b"o" * 20


def applied(*identities: tuple[bytes, int, int]) -> Applied:
    found = Applied()
    for node, incarnation, step in identities:
        found.add(DeltaId(node, incarnation, step))
    return found


def test_the_history_of_a_node_is_its_highest_incarnation_and_step() -> None:
    """Each over all states by itself: the highest step may be of an earlier incarnation."""
    states = [applied((NODE, 1, 30), (OTHER, 9, 99)), applied((NODE, 3, 12))]

    assert highest_step_of(NODE, states, starts=1, steps=1000) == (3, 30)
    assert highest_step_of(b"x" * 20, states, starts=1, steps=1000) == (0, 0)


def test_identities_that_nothing_explains_are_not_a_node_s_past() -> None:
    """A start or a step that somebody has forged is passed over, and what is true in the same set counts."""
    forged = Applied.of_rows([(NODE, 1 << 40, [(1, 5)]), (NODE, 2, [(1, 7), (1 << 40, 1 << 41)])])
    assert highest_step_of(NODE, [forged], starts=2, steps=1000) == (2, 7)
