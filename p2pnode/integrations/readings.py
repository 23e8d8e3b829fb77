"""Reads batches and metrics as the libraries pass them to callbacks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch


def batch_size(batch: Any) -> int:
    """The leading dimension of the first tensor in a batch of any nesting; 0 if it has none."""
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.ndim else 0
    parts: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        parts = batch
    return next((size for part in parts if (size := batch_size(part))), 0)


def mean(values: Sequence[torch.Tensor]) -> torch.Tensor | float:
    """The mean of scalars, on their device; NaN without any."""
    return torch.stack([value.float() for value in values]).mean() if values else math.nan


def numbers(metrics: Mapping[str, Any], prefixes: tuple[str, ...]) -> dict[str, float]:
    """The metrics that are scalars and whose names begin with one of the prefixes, without it."""
    found = {}
    for name, value in metrics.items():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        is_number = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        if prefix is not None and is_number:
            found[name.removeprefix(prefix)] = float(value)
    return found
