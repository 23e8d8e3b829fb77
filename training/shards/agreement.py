"""The rate of sparse deltas: how far the shared model moves, by how much the deltas of the nodes agree.

The mean of N deltas is shorter than each of them: √N times where they have nothing in common, not at all where they are
equal. The rate makes up for that, so that a step moves the shared model as far as one node moves its own (radial-
directional averaging; Decoupled DiLoCo, arXiv 2604.21428). Each node finds its rate alone. The change of the shared
values between two pulls is the sum of such deltas, its own among them. For deltas of one length the cosine between the
change and the node's own is the length of their mean over that of one. Pure.
"""

from __future__ import annotations

import math

import numpy as np

from p2pnode.training.encoding.codecs import Vector

#: What a step leaves of the sums of those before it. One step's cosine is a guess: other deltas come a step later.
DECAY = 0.8


class Agreement:
    """Sums over the last steps, of one node."""

    def __init__(self) -> None:
        self._delta: Vector | None = None
        self._product = self._changed = self._sent = 0.0

    def begin_step(self, delta: Vector | None) -> None:
        """Changes are compared with this delta from now on, `float32[total]` as the owners have it; None: with none."""
        self._delta = delta
        if delta is not None:
            self._product, self._changed, self._sent = (
                DECAY * one for one in (self._product, self._changed, self._sent)
            )

    def note(self, first: int, former: Vector, value: Vector) -> None:
        """The shared values from number `first` on have changed; both `float32[n]`."""
        if self._delta is not None:
            change, sent = value - former, self._delta[first : first + value.size]
            product, changed, own = (float(np.dot(*pair)) for pair in ((change, sent), (change, change), (sent, sent)))
            # A delta that is not finite was not sent, and would stay in the sums.
            if math.isfinite(product + changed + own):
                self._product += product
                self._changed += changed
                self._sent += own

    @property
    def cosine(self) -> float | None:
        """From -1 to 1; None while nothing is known."""
        lengths = math.sqrt(self._changed) * math.sqrt(self._sent)
        return self._product / lengths if lengths else None

    def rate(self, workers: float) -> float:
        """From 1, for equal deltas, to √`workers`, for deltas without anything in common; 1 while nothing is known."""
        most, cosine = math.sqrt(max(1.0, workers)), self.cosine
        if cosine is None:
            return 1.0
        return most if cosine * most <= 1.0 else 1.0 / cosine
