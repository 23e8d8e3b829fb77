"""An owner that gives no results is waited for as long as it has credit, and blamed for nothing."""

from __future__ import annotations

import pytest

from training.exchange.wait_credit import (
    AGAIN_S,
    EARNED,
    FIRST_S,
    MAX_OWNERS,
    SPARE_FACTOR,
    SPARE_SHARE,
    OwnerWait,
    WaitCredit,
)

A, B = b"a", b"b"
STEP_S = 4.0
SPARE_S = SPARE_SHARE * STEP_S
OWNERS = {0: A, 1: A, 2: B, 3: b""}


def wait_of(credit: WaitCredit, began_s: float = 0.0) -> OwnerWait:
    return OwnerWait(credit, OWNERS.__getitem__, began_s, lambda: STEP_S)


def spent(*owners: bytes, now_s: float = 0.0) -> WaitCredit:
    credit = WaitCredit()
    for owner in owners:
        credit.pay(owner, FIRST_S, now_s)
    return credit


def test_an_owner_without_credit_is_not_waited_for_until_it_has_earned_some() -> None:
    """It is waited for again when it has enough for a wait, and never has more than at first."""
    credit = WaitCredit()
    credit.pay(A, FIRST_S - 1.0, 0.0)
    assert not credit.is_spent(A, 0.0)
    credit.pay(A, 5.0, 0.0)
    assert credit.is_any_spent
    assert credit.is_spent(A, (AGAIN_S + 4.0) / EARNED - 1.0)
    assert not credit.is_spent(A, (AGAIN_S + 4.0) / EARNED + 1.0)
    assert not credit.is_any_spent
    assert credit.left_s(A, 1e6) == credit.left_s(B, 0.0) == FIRST_S


@pytest.mark.parametrize("behaviour", ["puts everything off", "is silent", "gives results at the last moment"])
def test_all_waits_for_one_owner_are_bounded(behaviour: str) -> None:
    """Whatever it does: by the first credit, what it earns, and a spare of each step."""
    credit, now_s, waited_s = WaitCredit(), 0.0, 0.0
    for _ in range(500):
        wait, began_s = wait_of(credit, now_s), now_s
        while True:
            if behaviour != "is silent":
                wait.put_off([0])
            if wait.is_over([0], now_s) or (behaviour.startswith("gives") and now_s - began_s > 4.5):
                break
            if now_s - began_s >= 5.0:
                wait.ended_silent([0], 5.0, now_s)
                break
            now_s += 0.01
        waited_s += now_s - began_s
        now_s += STEP_S
    assert waited_s <= FIRST_S + 5.0 + EARNED * now_s + 500 * (SPARE_S + 0.02)
    assert waited_s >= FIRST_S


def test_only_what_is_put_off_by_all_that_is_awaited_is_paid_for() -> None:
    """While another owner is waited for too, or one that nobody knows, the wait is theirs."""
    for others in ([2], [3]):
        credit = WaitCredit()
        wait = wait_of(credit)
        wait.put_off([0])
        for at_s in range(4):
            assert not wait.is_over([0, *others], float(at_s))
        assert credit.left_s(A, 4.0) == FIRST_S
    wait.put_off([2])
    assert not wait.is_over([0, 2], 4.0)
    assert not wait.is_over([0, 2], 4.0 + SPARE_FACTOR * 4.0 + 1.0)
    assert credit.left_s(A, 13.0) == credit.left_s(B, 13.0) == FIRST_S - 1.0


def test_a_late_owner_has_twice_as_long_as_the_others_took() -> None:
    """Also one without credit, and a share of a step at least: it may have recovered."""
    for took_s, spare_s in ((0.0, SPARE_S), (3.0, SPARE_FACTOR * 3.0)):
        wait = wait_of(spent(A))
        assert not wait.is_over([0, 2], took_s)
        assert not wait.is_over([0], took_s)
        assert not wait.is_over([0], took_s + spare_s - 0.01)
        assert wait.is_over([0], took_s + spare_s)
    assert not wait_of(spent(A)).is_over([], 9.0)


def test_an_owner_is_not_paid_for_twice_in_one_wait() -> None:
    """A wait that ends at its limit was paid for in part, where the owner has put it off."""
    credit = WaitCredit()
    wait = wait_of(credit)
    wait.put_off([0, 1])
    for at_s in (0.0, SPARE_S + 2.0):
        wait.is_over([0, 1], at_s)
    wait.ended_silent([0, 1, 3], 5.0, 5.0)
    assert credit.left_s(A, 5.0) == pytest.approx(FIRST_S - 5.0, abs=EARNED * 5.0)


def test_looks_are_close_while_an_owner_has_no_credit() -> None:
    """Its steps end soon after the others' results; so while something is put off, and else there is nothing to see."""
    wait = wait_of(WaitCredit())
    assert wait.look_s == float("inf")
    wait.put_off([0])
    assert wait.look_s < SPARE_S
    assert wait_of(spent(A)).look_s < SPARE_S


def test_the_owners_that_are_remembered_are_bounded() -> None:
    credit = WaitCredit()
    for number in range(MAX_OWNERS + 1):
        credit.pay(number.to_bytes(2, "big"), FIRST_S, 0.0)
    assert not credit.is_spent(bytes(2), 0.0)
    assert credit.is_spent((1).to_bytes(2, "big"), 0.0)


def test_an_owner_that_was_started_again_is_waited_for_again() -> None:
    """Whatever it has cost before."""
    credit = WaitCredit()
    credit.pay(b"a", 2 * FIRST_S, 0.0)
    assert credit.is_spent(b"a", 0.0)
    credit.forgive(b"a")
    assert (credit.is_spent(b"a", 0.0), credit.left_s(b"a", 0.0)) == (False, FIRST_S)
