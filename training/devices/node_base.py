"""The base of a node with several trainers, and its progress beyond it: `training.trainer.model.vector` of one trainer.

The trainers of a cycle load shared values, and begin `carried` beyond them: the node's deltas that those values lack,
and its progress. Pure.
"""

from __future__ import annotations

import numpy as np

from p2pnode.training.devices.positions import is_finite
from p2pnode.training.trainer_link.interface import Ranges, Vector


class NodeBase:
    """`vector` and `delta` are the node's, which the exchange uses; trainers load `shared`. All `float32[total]`."""

    def __init__(self, vector: Vector, delta: Vector, shared: Vector) -> None:
        self._vector = vector
        self._delta = delta
        self._shared = shared
        self._progress = np.zeros_like(vector)
        #: What of the node's deltas the shared values lack.
        self._ahead = np.zeros_like(vector)
        #: How far the node comes in a step.
        self.way = np.zeros_like(vector)
        #: From a cut to the arrival of the values that contain it.
        self.is_exchanging = False
        #: `delta` holds what goes to the owners of the last cut, and the base has not got it yet.
        self.is_sent = False
        self.known_step = 0

    def carried(self) -> Vector | None:
        """Where the trainers begin, beyond the shared values."""
        self._settle()
        carried = self._progress + self._ahead
        return carried if carried.any() else None

    def add_way(self) -> None:
        """A step has ended."""
        self._progress += self.way

    def cut(self) -> bool:
        """Take the progress as a delta. False for one that is not finite: the node is at its base again."""
        self._settle()
        if not is_finite(self._progress):
            self._progress[:] = 0.0
            return False
        self._delta[:] = self._progress
        self.is_exchanging = True
        return True

    def enter(self, step: int, held: Ranges, returned: Ranges, lacking: Ranges = ()) -> None:
        """See `Trainer.arrived`."""
        self._settle()
        for first, end in returned:
            self._progress[first:end] += self._delta[first:end]
            self._ahead[first:end] -= self._delta[first:end]
        kept = [(slice(*each), self._shared[slice(*each)].copy(), self._ahead[slice(*each)].copy()) for each in held]
        self._shared[:] = self._vector
        self._ahead[:] = 0.0
        for part, values, ahead in kept:
            self._shared[part] = values
            self._ahead[part] = ahead
        for first, end in lacking:
            self._ahead[first:end] = self._delta[first:end]
        self.is_exchanging, self.known_step = False, step

    def _settle(self) -> None:
        if self.is_sent:
            self.is_sent = False
            self._progress -= self._delta
            self._ahead += self._delta
