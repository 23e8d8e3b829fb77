"""How long a trainer's turns and evaluations take, and so how long it may be silent in the next one. Pure."""

from __future__ import annotations

import statistics
from collections import deque

from p2pnode.training.supervisor.silence import Limits
from p2pnode.training.trainer_link import messages

#: Durations kept for the median.
PACE_STEPS = 21


class OrderPace:
    """Of one trainer, over all its processes. `hang_s`: `training.hang_s`."""

    def __init__(self, hang_s: float) -> None:
        self._hang_s = hang_s
        #: Turns, merges and evaluations have a duration: the other orders write a file.
        self._durations_s: dict[type[messages.Order], deque[float]] = {
            messages.Train: deque(maxlen=PACE_STEPS),
            messages.Merge: deque(maxlen=PACE_STEPS),
            messages.Evaluate: deque(maxlen=PACE_STEPS),
        }
        #: What the present process has done before: the first of each kind may take long.
        self._done_before: set[type[messages.Order]] = set()

    def new_process(self) -> None:
        """The trainer is started again."""
        self._done_before.clear()

    @property
    def has_trained(self) -> bool:
        """Whether a turn was completed."""
        return bool(self._durations_s[messages.Train])

    def limits(self, order: messages.Order | None) -> Limits:
        """How long the trainer may be silent in this order; None: until values have entered, as in a turn."""
        kind = messages.Train if order is None else type(order)
        medians = [statistics.median(known) for known in self._durations_s.values() if known]
        pace_s = max(medians, default=0.0) if kind in self._done_before else None
        return Limits.of(self._hang_s, pace_s, writes_file=kind not in self._durations_s)

    def note(self, order: messages.Order, seconds: float) -> None:
        """The order was answered after so long."""
        if type(order) in self._durations_s:
            self._durations_s[type(order)].append(seconds)
            self._done_before.add(type(order))
