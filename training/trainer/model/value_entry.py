"""How shared values enter the model while it trains, and what leaves it: the trainer's half of an exchange.

A cut takes the progress as a delta, and training goes on at once. The daemon says what of it is on its way to the
owners, and later that the values which contain it are there. Both are applied between two optimiser steps, on all ranks
at the same one, by each to its own parts. The next cut waits for them: until then progress adds up, and the trainer
stands still for nothing.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from p2pnode.training.shards.delta_range import MAX_LENGTH
from p2pnode.training.trainer.model.vector import ModelVector
from p2pnode.training.trainer.model.weight_loads import WeightLoads
from p2pnode.training.trainer.ranks import Ranks
from p2pnode.training.trainer_link.interface import Ranges, Vector
from p2pnode.training.trainer_link.messages import DeltaEncoded, ValuesArrived

News = DeltaEncoded | ValuesArrived


class ValueEntry:
    """Of one model. All ranks call `apply` and `cut` at the same optimiser steps; only rank 0 has news."""

    def __init__(self, model_vector: ModelVector, ranks: Ranks) -> None:
        self._model_vector = model_vector
        self._ranks = ranks
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
        """The buffers that this rank shares with the daemon, `float32[total]`."""
        self.vector, self.delta = vector, delta

    def cut(self, loads: WeightLoads) -> tuple[bool, bool]:
        """Write the progress into `delta`, unless the exchange of the last one has not ended. Returns whether it is one
        that owners add, and whether there is one. Where a value is not finite or absurd the model is at its base
        again."""
        self.has_rest = self.is_exchanging
        if self.is_exchanging:
            return True, False
        with loads.exchanging():
            length = self._model_vector.cut(self.delta)
        is_finite = math.hypot(*self._ranks.gather_numbers(length)) <= MAX_LENGTH
        if not is_finite:
            with loads.load():
                self._model_vector.load_base()
        self.is_exchanging = is_finite
        return is_finite, True

    def apply(self, news: News | None, loads: WeightLoads) -> bool:
        """Apply what the daemon has said; False if nothing. `news` is None on all ranks but the first."""
        if not self._ranks.share_number(int(news is not None)):
            return False
        news = self._ranks.share(news)
        if not isinstance(news, ValuesArrived):
            self._model_vector.add_to_base(torch.from_numpy(self.delta))
            return True
        if news.takes_back:
            self._model_vector.take_back(self._part(news.takes_back))
        added = self._part(news.adds_delta) if news.adds_delta else None
        keeps_base = self._mask(news.keeps_base) if news.keeps_base else None
        with loads.load():
            self._model_vector.enter(torch.from_numpy(self.vector), added, keeps_base)
        self._ranks.gather_numbers(0.0)  # The daemon may write both buffers again when all ranks have read them.
        self.is_exchanging, self.known_step = False, news.step
        return True

    def _part(self, ranges: Ranges) -> Tensor:
        """The delta in these ranges, and zeros elsewhere."""
        delta = torch.from_numpy(self.delta)
        part = torch.zeros_like(delta)
        for first, end in ranges:
            part[first:end] = delta[first:end]
        return part

    def _mask(self, ranges: Ranges) -> Tensor:
        """True in these ranges, `bool[total]`."""
        mask = torch.zeros(len(self.delta), dtype=torch.bool)
        for first, end in ranges:
            mask[first:end] = True
        return mask
