"""Divides the data set of a library's `DataLoader` among the nodes, where the library itself chooses the order.

The loader exists when the node attaches, and torch forbids another sampler for it. But its `BatchSampler` reads its own
sampler anew in each iteration, so that one is replaced. An epoch keeps its number of batches, on which schedules and
limits depend: among N nodes it is N passes over the data together. The callbacks of all libraries also share how they
read what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

if TYPE_CHECKING:
    from p2pnode.training.trainer.attached_swarm import AttachedSwarm


class DividedData:
    """Belongs to one callback; `take` its loader. Nothing is divided unless it `is_wanted`."""

    def __init__(self, *, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._batch_size = 0

    def take(self, loader: Any, swarm: AttachedSwarm) -> bool:
        """Let the nodes divide the data of this loader. False: it is left as it is, because its order is the user's own
        (another sampler or batch sampler, an iterable data set), or the script shares data already."""
        self._batch_size = 0
        if not self._is_wanted or swarm.done:
            return False
        ranks = _ranks()
        batches: Any = getattr(loader, "batch_sampler", None)
        inner: Any = _of_all_ranks(batches) if ranks > 1 else batches
        if type(inner) is not BatchSampler or (shuffle := _shuffles(inner.sampler, loader.dataset, ranks)) is None:
            return False
        if ranks > 1 and inner is batches and not isinstance(inner.sampler, DistributedSampler):
            return False  # its ranks do not divide it either
        if not (length := len(loader) * inner.batch_size):
            return False
        try:
            sampler = swarm.sampler(loader.dataset, shuffle=shuffle)
        except ValueError:
            return False
        sampler.length = length
        inner.sampler = sampler
        if inner is not batches:
            # The swarm's sampler divides the node's part among its ranks.
            batches.num_processes, batches.process_index = 1, 0
        self._batch_size = inner.batch_size
        return True

    def samples(self, batches: int, seen: int) -> int:
        """Samples of so many batches, which are all full. `seen` where the data is not divided: that is what the inputs
        look like, which may be packed."""
        return batches * self._batch_size or seen


def _ranks() -> int:
    is_one_of_several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_one_of_several else 1


def _of_all_ranks(batches: Any) -> Any:
    """The batch sampler inside that of accelerate, which gives every rank some of its batches."""
    if type(batches).__name__ == "BatchSamplerShard" and not batches.split_batches:
        return batches.batch_sampler
    return batches


def _shuffles(sampler: Any, dataset: Any, ranks: int) -> bool | None:
    """Whether a library's own sampler shuffles; None for a user's own."""
    if type(sampler) is SequentialSampler:
        return False
    if type(sampler) is DistributedSampler:
        return sampler.shuffle if sampler.num_replicas == ranks else None
    # accelerate's has a seed in addition
    is_plain = type(sampler) is RandomSampler or type(sampler).__name__ == "SeedableRandomSampler"
    return True if is_plain and not sampler.replacement and sampler.num_samples == len(dataset) else None


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
