"""Decides whether the trainer goes on while a step is exchanged (`exchange.overlap`). Pure.

Overlap hides the exchange, and lets a step begin with values that are one step older. On a line that carries a step at
once there is nothing to hide, and older values learn a little slower. So "auto" turns it on where the exchange takes a
notable part of the step, and off again where it no longer does. Where the line is measured before the first exchange,
by the vector that a joiner was sent, its time is known in closed form, and the first exchange is hidden too.
"""

from __future__ import annotations

from training.settings import ExchangeSettings

#: An exchange is worth hiding if it takes this part of the step's training, and this many seconds, so many times in a
#: row. Below the seconds, older values would cost more than a person could notice as time.
WORTH_PART, WORTH_S, WORTH_STEPS = 0.05, 0.5, 2
#: It is worth hiding no more if it takes less than this part of those, so many times in a row.
GONE_PART, GONE_STEPS = 0.4, 10


class OverlapChoice:
    """Whether steps overlap with the exchange now. Under bsp each step begins with the values of all: never."""

    def __init__(self, settings: ExchangeSettings, *, synchronous: bool) -> None:
        self.is_possible = bool(settings.overlap) and settings.enabled and not synchronous
        self.is_automatic = self.is_possible and settings.overlap == "auto"
        self.is_on = self.is_possible and not self.is_automatic
        #: Whether nothing is known of an exchange yet, neither by the line nor by one that took place.
        self.is_open = self.is_automatic
        self._in_a_row = 0

    def expect(self, train_s: float, exchange_s: float) -> bool:
        """The first step trained for `train_s` seconds, and by the measured line its exchange takes `exchange_s`.
        Returns whether that changed `is_on`."""
        if not self.is_open:
            return False
        self.is_open = False
        self.is_on = exchange_s >= _worth_s(train_s)
        return self.is_on

    def note(self, train_s: float, exchange_s: float) -> bool:
        """A step trained for `train_s` seconds, and was pushed and pulled for `exchange_s`, without the wait at the
        barrier. Returns whether that changed `is_on`."""
        if not self.is_automatic:
            return False
        self.is_open = False
        worth_s = _worth_s(train_s)
        is_sign = exchange_s < GONE_PART * worth_s if self.is_on else exchange_s >= worth_s
        self._in_a_row = self._in_a_row + 1 if is_sign else 0
        if self._in_a_row < (GONE_STEPS if self.is_on else WORTH_STEPS):
            return False
        self.is_on, self._in_a_row = not self.is_on, 0
        return True


def _worth_s(train_s: float) -> float:
    """Seconds of an exchange that are worth hiding beside a step of `train_s`."""
    return max(WORTH_S, WORTH_PART * train_s)
