"""How shared values enter the model while it trains, and what leaves it: the trainer's half of an exchange.

A cut takes the progress as a delta, and training goes on at once. The daemon says what of it is on its way to the
owners, and later that the values which contain it are there. Both are applied between two optimiser steps, on all ranks
at the same one. The next cut waits for them: until then progress adds up, and the trainer stands still for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from p2pnode.training.trainer.model.vector import ModelVector
from p2pnode.training.trainer.model.weight_loads import WeightLoads
from p2pnode.training.trainer.ranks import Ranks
from p2pnode.training.trainer_link.interface import Vector
from p2pnode.training.trainer_link.messages import DeltaSent, ValuesArrived

News = DeltaSent | ValuesArrived

_NONE, _SENT, _ARRIVED = range(3)
#: Added to `_ARRIVED`.
_RETURNED, _LACKING = 4, 8


class ValueEntry:
    """Of one model. All ranks call `apply` and `cut` at the same optimiser steps; only rank 0 has news and buffers."""

    def __init__(self, model_vector: ModelVector, ranks: Ranks | None = None) -> None:
        self._model_vector = model_vector
        self._ranks = ranks or Ranks(0, 1, "cpu")
        self.vector: Vector = np.zeros(0, np.float32)
        self.delta: Vector = np.zeros(0, np.float32)
        #: From a cut to the arrival of the values that contain it.
        self.is_exchanging = False
        #: Whether the last cut took nothing, because the last delta was being exchanged: all that was reported since
        #: is in none yet.
        self.has_rest = False
        #: The step whose shared values the model began with or has taken.
        self.known_step = 0

    def use(self, vector: Vector, delta: Vector) -> None:
        """The buffers that rank 0 shares with the daemon, `float32[total]`."""
        self.vector, self.delta = vector, delta

    def cut(self, loads: WeightLoads) -> tuple[bool, bool]:
        """Write the progress into `delta`, unless the exchange of the last one has not ended. Returns whether it is one
        that owners add, and whether there is one. Where a value is not finite or absurd the model is at its base
        again."""
        self.has_rest = self.is_exchanging
        if self.is_exchanging:
            return True, False
        is_finite = True
        if self._ranks.is_first:
            with loads.exchanging():
                is_finite = self._model_vector.cut(self.delta)
        is_finite = bool(self._ranks.share_number(int(is_finite)))
        if not is_finite:
            with loads.load():
                self._model_vector.load_base()
        self.is_exchanging = is_finite
        return is_finite, True

    def apply(self, news: News | None, loads: WeightLoads) -> bool:
        """Apply what the daemon has said; False if nothing. `news` is None on all ranks but the first."""
        code = self._ranks.share_number(_code(news))
        if code == _NONE:
            return False
        if code == _SENT:
            self._model_vector.settle(self._share(self.delta))
            return True
        arrived = news if isinstance(news, ValuesArrived) else ValuesArrived(self.known_step)
        if code & _RETURNED:
            self._model_vector.take_back(self._share(self._part(arrived.returned)))
        # Only for the shared weights, so it takes no memory of the device.
        lacking = self._share(self._part(arrived.lacking)).cpu() if code & _LACKING else None
        with loads.load():
            self._model_vector.enter(self._share(self.vector, arrived.held, arrived.lacking), lacking)
        self.is_exchanging, self.known_step = False, arrived.step
        return True

    def _part(self, ranges: Sequence[tuple[int, int]]) -> Vector:
        """The delta in these ranges, and zeros elsewhere."""
        part = np.zeros_like(self.delta)
        for first, end in ranges:
            part[first:end] = self.delta[first:end]
        return part

    def _share(
        self, values: Vector, held: Sequence[tuple[int, int]] = (), lacking: Sequence[tuple[int, int]] = ()
    ) -> Tensor:
        """On all ranks: `float32[total]` of rank 0, with the base in the ranges that are `held`, and with the delta in
        those that lack it."""
        found = torch.from_numpy(values) if self._ranks.is_first else torch.empty_like(self._model_vector.base)
        if held or lacking:
            found = found.clone()
        for first, end in held:
            found[first:end] = self._model_vector.base[first:end]
        for first, end in lacking:
            found[first:end] += torch.from_numpy(self.delta[first:end])
        return self._ranks.share_tensor(found)


def _code(news: News | None) -> int:
    match news:
        case None:
            return _NONE
        case DeltaSent():
            return _SENT
        case ValuesArrived():
            return _ARRIVED + _RETURNED * bool(news.returned) + _LACKING * bool(news.lacking)
