"""What `AttachedSwarm` offers a script beside its turns: the node's settings, its data, and signs of life between two
steps, so that silence is no hang.

`p2pnode run` builds no model and loads no data, so settings have no effect of their own: the script uses them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import IterableDataset

from p2pnode.training.trainer.connection import DaemonConnection, DaemonGone
from p2pnode.training.trainer.loading import resolve_device
from p2pnode.training.trainer.records.record_draws import Decode
from p2pnode.training.trainer.sampling.sampler import SwarmSampler
from p2pnode.training.trainer.sampling.shard import SwarmShard
from p2pnode.training.trainer.sampling.shared_data import SharedData
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.messages import Start


@dataclass(frozen=True, slots=True)
class ScriptSettings:
    """`seed` differs on every node and at every start. `device` is one that torch takes, such as "cuda:0". `data_dir`
    is absolute, or empty."""

    seed: int = 0
    device: str = "cpu"
    data_dir: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    device_index: int = 0
    device_count: int = 1

    @classmethod
    def of(cls, start: Start) -> ScriptSettings:
        """Those of the daemon's first message. Raises `TrainerFailed` for a device that this machine has not."""
        device, options = resolve_device(start.device), dict(start.options)
        return cls(start.start_seed, device, start.data_dir, options, start.device_index, start.device_count)


class NodeKnowledge:
    """What `AttachedSwarm` says of the node that the script runs in."""

    _settings: ScriptSettings

    @property
    def seed(self) -> int:
        """A seed for this script's own shuffling and dropout: it differs on every node and at every start."""
        return self._settings.seed

    @property
    def device_index(self) -> int:
        """This process's place among the trainers of its node (`training.devices`); 0 with a single one."""
        return self._settings.device_index

    @property
    def device_count(self) -> int:
        """The trainers of this node; `workers` and `node_index` count trainers, not nodes, where there are several."""
        return self._settings.device_count

    @property
    def device(self) -> str:
        """`training.device` as torch takes it, such as "cuda:0"."""
        return self._settings.device

    @property
    def data_dir(self) -> str:
        """`training.data_dir`, absolute; empty if it is not set."""
        return self._settings.data_dir

    @property
    def options(self) -> dict[str, Any]:
        """`[training.options]`."""
        return self._settings.options


#: `swarm.alive()` sends at most this often.
ALIVE_INTERVAL_S = 0.2


class SignsOfLife:
    """`connection` is None on all ranks but the first."""

    def __init__(self, connection: DaemonConnection | None) -> None:
        self._connection = connection
        self._alive_s = 0.0
        self._busy_with: list[str] = []

    def alive(self) -> None:
        """Say that all is well, in work between two steps that takes long: a silent script counts as stalled after
        `training.hang_s`. May be called as often as you like, from any thread, and on any rank."""
        now_s = time.monotonic()
        if self._connection is not None and now_s - self._alive_s >= ALIVE_INTERVAL_S:
            self._alive_s = now_s
            with contextlib.suppress(DaemonGone):
                self._connection.send(messages.SignOfLife())

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Say that the block does something else than a step, however long it takes; `/status` shows `what`."""
        self._busy_with.append(what)
        self._tell_busy()
        try:
            yield
        finally:
            self._busy_with.pop()
            self._tell_busy()

    def _tell_busy(self) -> None:
        if self._connection is not None:
            message = messages.Busy(self._busy_with[-1]) if self._busy_with else messages.Idle()
            with contextlib.suppress(DaemonGone):
                self._connection.send(message)


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
