"""The data that a script shares with other nodes: `swarm.sampler`, `swarm.shard` and `swarm.records`.

`AttachedSwarm` inherits these methods; docs/data.md and docs/dispatch.md describe them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from typing import Any

from torch.utils.data import IterableDataset

from p2pnode.training.trainer.records.record_draws import Decode
from p2pnode.training.trainer.sampling.sampler import SwarmSampler
from p2pnode.training.trainer.sampling.shard import SwarmShard
from p2pnode.training.trainer.sampling.shared_data import SharedData


class SwarmData:
    """A script's way to its data. `flush` ends the turn under way, if it has optimiser steps."""

    def __init__(self, data: SharedData, flush: Callable[[], bool]) -> None:
        self._data = data
        self._flush = flush
        self.workers = 1.0

    def sampler(self, dataset: Sized, *, shuffle: bool = True) -> SwarmSampler:
        """A sampler for `torch.utils.data.DataLoader` that shares `dataset` with the other nodes (docs/data.md).

        One iteration gives this node's part of an epoch: every sample of an epoch is trained by one node, also when
        nodes join, leave or crash in the middle of it. `swarm.step(samples=…)` counts what is trained. The position is
        saved with the script's state. `dataset` is anything with a length that is equal on all nodes. Raises
        `ValueError` if it is empty, or if this script shares data already.
        """
        return self._data.sampler(len(dataset), shuffle=shuffle, nodes=self.workers)

    def shard(self, iterable: Iterable[Any], *, block: int = 64) -> SwarmShard:
        """An iterable data set that gives this node's part of `iterable`, in blocks of `block` samples (docs/data.md).

        As `sampler`, for data that can only be read in order: each iteration has to give the same samples in the same
        order on all nodes. Raises `ValueError` if this script shares data already.
        """
        return self._data.shard(iterable, block)

    def records(self, decode: Decode | None = None) -> IterableDataset[Any]:
        """An iterable data set of the records of `[dispatch]` that this node is to train (docs/dispatch.md).

        `decode` makes a sample of the bytes of a record; without it a sample is the bytes. A record for which it raises
        fails its task. Give it to a `DataLoader` with `num_workers=0` and `drop_last=False`; `swarm.step(samples=…)`
        counts what is trained. Raises `ValueError` where no records are set, where this script shares data already, and
        under torchrun; and for files that cannot be read.
        """
        return self._data.records(decode, self._flush)
