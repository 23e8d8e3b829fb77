"""When steps overlap with their exchange."""

from __future__ import annotations

import pytest

from training.overlap_choice import GONE_STEPS, WORTH_STEPS, OverlapChoice
from training.settings import ExchangeSettings


@pytest.mark.parametrize(
    ("settings", "synchronous", "expected"),
    [
        (ExchangeSettings(), False, False),
        (ExchangeSettings(overlap=True), False, True),
        (ExchangeSettings(overlap=True), True, False),
        (ExchangeSettings(overlap=True, enabled=False), False, False),
    ],
)
def test_steps_overlap_where_they_are_to_and_can(settings: ExchangeSettings, synchronous: bool, expected: bool) -> None:
    """Not at once by default, never under bsp, and not where nothing is exchanged."""
    assert OverlapChoice(settings, synchronous=synchronous).is_on is expected


def after(choice: OverlapChoice, steps: int, train_s: float, exchange_s: float) -> bool:
    """Whether steps overlap after so many steps of this kind."""
    for _ in range(steps):
        choice.note(train_s, exchange_s)
    return choice.is_on


@pytest.mark.parametrize(
    ("train_s", "exchange_s", "expected"),
    [
        (10.0, 2.0, True),
        (10.0, 0.51, True),
        (10.0, 0.4, False),  # 4 %
        (0.1, 0.4, False),  # most of the time, but not long
        (0.1, 0.6, True),
        (100.0, 4.0, False),
        (100.0, 6.0, True),
    ],
)
def test_a_long_exchange_is_hidden(train_s: float, exchange_s: float, expected: bool) -> None:
    """It counts as long from half a second and a twentieth of the training on."""
    assert after(OverlapChoice(ExchangeSettings(), synchronous=False), WORTH_STEPS, train_s, exchange_s) is expected


def test_one_long_exchange_changes_nothing() -> None:
    """Long ones have to follow each other, and so do short ones before overlap ends."""
    choice = OverlapChoice(ExchangeSettings(), synchronous=False)
    for _ in range(5):
        assert not after(choice, WORTH_STEPS - 1, 10.0, 5.0)
        assert not after(choice, 1, 10.0, 0.1)
    assert after(choice, WORTH_STEPS, 10.0, 5.0)
    for _ in range(5):
        assert after(choice, GONE_STEPS - 1, 10.0, 0.1)
        assert after(choice, 1, 10.0, 0.4)
    assert not after(choice, GONE_STEPS, 10.0, 0.1)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_setting_of_the_user_stays(overlap: bool) -> None:
    """Only "auto" follows the exchange."""
    choice = OverlapChoice(ExchangeSettings(overlap=overlap), synchronous=False)

    assert after(choice, 100, 10.0, 0.0) is overlap
    assert after(choice, 100, 10.0, 60.0) is overlap


def test_a_line_that_is_known_decides_before_the_first_exchange() -> None:
    """Once, before any exchange took place, and only where overlap is automatic."""
    choice = OverlapChoice(ExchangeSettings(), synchronous=False)
    assert choice.is_open
    assert choice.expect(10.0, 0.6)
    assert choice.is_on
    assert not choice.expect(10.0, 0.1)
    assert choice.is_on

    short = OverlapChoice(ExchangeSettings(), synchronous=False)
    assert not short.expect(10.0, 0.4)
    assert not short.is_on
    assert not short.expect(10.0, 9.0), "what took place counts from then on"

    later = OverlapChoice(ExchangeSettings(), synchronous=False)
    later.note(10.0, 0.1)
    assert not later.expect(10.0, 9.0)
    for settings in (ExchangeSettings(overlap=False), ExchangeSettings(overlap=True)):
        choice = OverlapChoice(settings, synchronous=False)
        assert not choice.expect(10.0, 9.0)
        assert choice.is_on is settings.overlap
