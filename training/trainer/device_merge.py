"""The distributed step between the devices of a node by `torch.distributed`: NCCL between GPUs, gloo elsewhere.

A trainer reports, and keeps its delta on its device. The daemon then tells those that have reported to merge: the group
sums the weighted deltas, one trainer writes the mean into shared memory, and all go on from it without loading it. So a
trainer that died or hung before the merge is in no group. One that ends inside of it ends the merge of the others. They
still have their deltas: a merge of a single member writes its own delta, as without a group.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from p2pnode.training.trainer.model.vector import ModelVector
from p2pnode.training.trainer_link.interface import MergeOrder, StepOrder, Vector


class DeviceMerge:
    """Of one trainer and its model."""

    def __init__(self, model_vector: ModelVector) -> None:
        self._model_vector = model_vector
        self._group: Any = None
        self._number = -1
        #: What the group has come to: the mean of the last merge.
        self._mean: Tensor | None = None

    @torch.no_grad()
    def load(self, order: StepOrder | None, vector: Vector, delta: Vector) -> None:
        """Load what a turn begins with: where the group's last merge ended, or the vector, or what the order says of
        `delta`."""
        if order is not None and order.at_delta:
            self._model_vector.load_at_delta(vector, delta)
        elif order is not None and order.continues and self._mean is not None:
            self._model_vector.go_on(self._mean)
        else:
            self._model_vector.load(vector)
        self._mean = None

    def report(self, order: StepOrder | None, delta: Vector) -> bool:
        """Write the delta of the turn, or keep it for the merge; whether it is finite, as far as that was looked at."""
        if order is None or not order.keeps_delta:
            self._model_vector.cut(delta)
            return True
        return self._model_vector.keep_delta()

    @torch.no_grad()
    def merge(self, order: MergeOrder, delta: Vector) -> bool:
        """Merge the deltas of the members. False: the group has failed, and every delta is as it was."""
        kept = self._model_vector.kept
        if len(order.members) == 1:
            torch.from_numpy(delta).copy_(kept)
            return True
        try:
            self._open(order)
            mean = kept * order.weight
            self._sum(order, mean)
        except (RuntimeError, OSError, ValueError):  # what torch.distributed raises for members that are gone
            self._close()
            return False
        # The delta is kept, in case that another member has not come so far.
        self._mean = mean
        if order.writes:
            torch.from_numpy(delta).copy_(mean)
        return True

    def _open(self, order: MergeOrder) -> None:
        if order.group != self._number:
            self._close()
            self._group, self._number = _opened(order), order.group

    def _sum(self, order: MergeOrder, values: Tensor) -> None:
        dist = _distributed()
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        self._wait(order, self._group.allreduce([values], options), values)

    @staticmethod
    def _wait(order: MergeOrder, work: Any, values: Tensor) -> None:
        work.wait(timedelta(seconds=order.timeout_s))
        if values.is_cuda:
            torch.cuda.synchronize(values.device)

    def _close(self) -> None:
        group, self._group, self._number = self._group, None, -1
        if group is not None:
            with contextlib.suppress(RuntimeError, AttributeError):
                group.abort()


def _distributed() -> Any:
    """`torch.distributed`, whose classes for a single group it does not export by type."""
    return importlib.import_module("torch.distributed")


def _opened(order: MergeOrder) -> Any:
    """A group of its own, beside the one that a script may have. Raises `RuntimeError`, also in time."""
    dist = _distributed()
    wait = timedelta(seconds=order.timeout_s)
    store = dist.FileStore(order.place, len(order.members))
    store.set_timeout(wait)
    rank, size = order.members.index(order.index), len(order.members)
    if order.backend == "nccl":
        # A member that is gone raises in `wait`, and does not end this process.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = wait  # noqa: SLF001 - as `torch.distributed.new_group` sets it
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    gloo = dist.ProcessGroupGloo._Options()  # noqa: SLF001
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001
    gloo._timeout = wait  # noqa: SLF001
    return dist.ProcessGroupGloo(store, rank, size, gloo)
