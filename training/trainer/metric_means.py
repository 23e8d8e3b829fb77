"""Means of a turn's losses and metrics, summed on the device: reading a value would wait for the device."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class MetricMeans:
    """Sums per name since the turn began."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, name: str, value: float | Tensor) -> None:
        """Add one value; a `loss` of NaN before any other loss means that none was given."""
        if isinstance(value, Tensor):
            term = value.detach().float().reshape(())
        elif name == "loss" and math.isnan(value) and name not in self._sums:
            return
        else:
            term = torch.tensor(float(value))
        self._sums[name] = self._sums[name] + term if name in self._sums else term
        self._counts[name] = self._counts.get(name, 0) + 1

    def __contains__(self, name: str) -> bool:
        return name in self._sums

    def means(self) -> dict[str, float]:
        """The mean per name; waits for the device."""
        return {name: float(total) / self._counts[name] for name, total in self._sums.items()}
