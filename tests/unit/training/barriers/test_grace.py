"""What a node may wait by `barrier.grace`: a credit that waits cost, and that steps abreast of others earn."""

from __future__ import annotations

from random import Random

import pytest

from training.barriers.grace import EARNED, FIRST, MOST, WORTH, GraceCredit, is_nearly_as_fast, share_abreast, worth

GRACE = 0.3


def waits(steps: int, random: Random, chance: float) -> tuple[float, float, int]:
    """What a node waits in so many steps of which each finds it abreast with this chance after a wait of random length,
    and otherwise after the whole grace; how much of it after half of the steps; and how many were abreast."""
    credit, waited, half, abreast = GraceCredit(), 0.0, 0.0, 0
    for step in range(steps):
        if step == steps // 2:
            half = waited
        if not credit.earn():
            continue
        is_abreast = random.random() < chance
        spent = random.random() * GRACE if is_abreast else GRACE
        waited, abreast = waited + spent, abreast + is_abreast
        credit.pay(spent, 1.0 if is_abreast else 0.5)
    return waited, waited - half, abreast


def in_a_row(credit: GraceCredit) -> int:
    """Waits in vain, until the credit is used up."""
    for number in range(20):
        if not credit.earn():
            return number
        credit.pay(GRACE, 0.5)
    raise AssertionError("a credit that is never used up")


@pytest.mark.parametrize("chance", [0.0, 0.2, 0.5, 0.9])
def test_waits_are_bounded_by_what_they_have_earned(chance: float) -> None:
    """Whatever comes, a node waits no longer than its credit and one grace."""
    for seed in range(20):
        waited, _, abreast = waits(500, Random(seed), chance)
        assert waited <= FIRST + WORTH * abreast + EARNED * 500 + GRACE, (seed, chance)


def test_where_it_never_pays_a_node_soon_waits_no_more() -> None:
    """Three waits at once, and later the time that steps earn: half a percent."""
    waited, late, _ = waits(2000, Random(1), 0.0)
    assert late == pytest.approx(EARNED * 1000, abs=FIRST + GRACE)
    assert waited <= FIRST + EARNED * 2000 + GRACE

    assert in_a_row(GraceCredit()) == 3


def test_where_it_pays_a_node_always_waits() -> None:
    """Waits of less than they are worth never end, and however long that lasts, the credit has a bound: after it a node
    that never finds the others any more has waited four times."""
    credit = GraceCredit()
    for _ in range(500):
        assert credit.earn()
        credit.pay(0.9 * WORTH, 1.0)
    for _ in range(50):
        credit.earn()
        credit.pay(0.0, 1.0)
    assert credit.left == MOST
    assert in_a_row(credit) == 4


def test_it_tries_again_with_the_first_credit() -> None:
    """So that waits follow one another: one alone brings no nodes together."""
    credit = GraceCredit()
    in_a_row(credit)
    closed = [credit.earn() for _ in range(round(1.5 * FIRST / EARNED))]
    assert closed.index(True) >= 0.9 * FIRST / EARNED
    credit.pay(GRACE, 0.0)
    assert credit.earn()


@pytest.mark.parametrize(("others", "share"), [([], 0.0), ([7, 7], 1.0), ([7, 6], 0.5), ([8, 8, 7, 6], 0.25)])
def test_abreast_is_who_has_completed_the_same_step(others: list[int], share: float) -> None:
    """Neither those behind nor those ahead, and of nobody there is no share."""
    assert share_abreast(7, others) == share


def test_being_abreast_of_half_is_worth_nothing() -> None:
    """So are groups of unequal speed, each of its own nodes; all are worth everything."""
    assert [worth(share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)] == [0.0, 0.0, 0.0, 0.5, 1.0]


def test_nobody_waits_for_a_slower_node() -> None:
    """A seventh slower is too slow; a node whose speed is not known yet counts as equal."""
    assert [is_nearly_as_fast(theirs, 1.0) for theirs in (0.0, 0.5, 1.1, 1.2, 4.0)] == [True, True, True, False, False]
