"""Lifeguard's local health (Dadgar et al. 2018): a node that lags doubts itself before it suspects others. Pure."""

from __future__ import annotations

#: A tick that is later than this shows that this node's loop lags.
LAG_S = 0.1
MAX_SCORE = 7


class LocalHealth:
    """A score: 0 is healthy; each sign that this node is slow raises it, each punctual tick lowers it."""

    def __init__(self) -> None:
        self.score = 0

    @property
    def stretch(self) -> float:
        """The factor of this node's time-outs."""
        return 1.0 + self.score

    def on_tick(self, lag_s: float) -> bool:
        """A timer fired this late. True: the loop lagged."""
        if lag_s > LAG_S:
            self.worsen()
            return True
        self.score = max(0, self.score - 1)
        return False

    def worsen(self) -> None:
        """A sign that this node is slow: a late timer, or a suspicion of it that it has to refute."""
        self.score = min(MAX_SCORE, self.score + 1)
