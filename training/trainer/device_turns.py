"""What a script does differently as one of several trainers of its node: before each optimiser step it asks what the
next iteration is, and after it the model is pulled to the leaders' values, the proximal term of leader SGD.

Those are the values of the leaders at the last distributed step, in memory that the daemon shares. The pulls compose as
in LSGD's local step: first to the leader of the swarm, then to that of the node.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from collections import deque
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from p2pnode.training.trainer.connection import DaemonConnection
from p2pnode.training.trainer.model.vector import ModelVector
from p2pnode.training.trainer_link.interface import MergeOrder, StepOrder, Vector
from p2pnode.training.trainer_link.messages import StepAnswer


class DeviceMerge:
    """Sums the weighted deltas of a group of trainers by `torch.distributed`: NCCL between GPUs, gloo elsewhere.

    A trainer reports, and keeps its delta on its device. The daemon then tells those that have reported to merge: one
    writes the mean into shared memory, and all go on from it without loading it. So a trainer that died or hung before
    the merge is in no group. One that ends inside of it ends the merge of the others. They still have their deltas: a
    merge of a single member writes its own delta, as without a group.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._number = -1

    @torch.no_grad()
    def mean(self, order: MergeOrder, kept: Tensor) -> Tensor | None:
        """The mean of what the members have kept; None: the group has failed."""
        try:
            if order.group != self._number:
                self._close()
                self._group, self._number = _opened(order), order.group
            mean = kept * order.weight
            options = _distributed().AllreduceOptions()
            options.reduceOp = _distributed().ReduceOp.SUM
            self._group.allreduce([mean], options).wait(timedelta(seconds=order.timeout_s))
            if mean.is_cuda:
                torch.cuda.synchronize(mean.device)
        except (RuntimeError, OSError, ValueError):  # what torch.distributed raises for members that are gone
            self._close()
            return None
        return mean

    def _close(self) -> None:
        group, self._group, self._number = self._group, None, -1
        if group is not None:
            with contextlib.suppress(RuntimeError, AttributeError):
                group.abort()


class DeviceTurns:
    """Belongs to one script; does nothing on a rank without a connection and for a single trainer."""

    def __init__(self, model_vector: ModelVector, connection: DaemonConnection | None) -> None:
        self._model_vector = model_vector
        self._connection = connection
        #: The values of the node's leader and, where there is one, of the swarm's, `float32[total]`.
        self._leaders: tuple[Vector, ...] = ()
        #: Where the model is pulled to in this turn, on its device, and how far.
        self._pulls: list[tuple[list[Tensor], float]] = []
        self._losses: deque[float] = deque(maxlen=0)
        self._merge = DeviceMerge()
        #: What the device reaches when it has done the step that was launched last.
        self._launched: Any = None
        #: What the group has come to: the mean of the last merge.
        self._mean: Tensor | None = None
        #: The daemon's last; before the first one that asks for nothing.
        self.order = StepOrder(0, 0, 1.0, is_first=False)

    def follow(self, leaders: tuple[Vector, ...]) -> None:
        """The values to which turns may pull the model."""
        self._leaders = leaders

    @torch.no_grad()
    def load(self, vector: Vector, delta: Vector) -> None:
        """Load what a turn begins with, or what the run has ended with: where the group's last merge ended, or the
        vector, or what the order says of `delta`."""
        if self.order.at_delta:
            self._model_vector.load_at_delta(vector, delta)
        elif self.order.continues and self._mean is not None:
            self._model_vector.go_on(self._mean)
        else:
            self._model_vector.load(vector)
        self._mean = None

    def report(self, delta: Vector) -> bool:
        """Write the delta of the turn, or keep it for a merge; whether it is finite, as far as that was looked at."""
        if not self.order.keeps_delta:
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
        # The delta is kept, in case that another member has not come so far.
        mean = self._merge.mean(order, kept)
        if mean is None:
            return False
        self._mean = mean
        if order.writes:
            torch.from_numpy(delta).copy_(mean)
        return True

    @torch.no_grad()
    def begin(self) -> None:
        """The weights of the turn are loaded: copy what it is pulled to. The swarm's leader is first."""
        shares = zip(self._leaders, (self.order.local_pull, self.order.global_pull), strict=False)
        self._pulls = [(self._model_vector.parts_of(vector), share) for vector, share in [*shares][::-1] if share]

    @property
    def moves(self) -> bool:
        """Whether the model is pulled to leaders in this turn."""
        return bool(self._pulls)

    @torch.no_grad()
    def stepped(self, loss: float | Tensor) -> None:
        """The script has taken an optimiser step: x ← (1 − p) x + p · leader, for each leader."""
        for parts, share in self._pulls:
            for (_, tensor), part in zip(self._model_vector.named_tensors(), parts, strict=True):
                tensor.lerp_(part.to(tensor.dtype), share)
        if window := self.order.loss_window:
            if window != self._losses.maxlen:
                self._losses = deque(self._losses, maxlen=window)
            self._losses.append(float(loss))

    def recent_loss(self) -> float | None:
        """The mean loss of the last batches; None while there are fewer than the window, so that a trainer with few
        batches does not look best, and where one is not finite."""
        if not self._losses or len(self._losses) != self._losses.maxlen or not all(map(math.isfinite, self._losses)):
            return None
        return math.fsum(self._losses) / len(self._losses)

    def next_step(self, *, is_due: bool) -> StepAnswer:
        """What is next. A single trainer reports when its turn has so many steps as were ordered (`is_due`). One of
        several asks, when the device has done all but the last step: one that only launches would be given the steps of
        all others. Raises `DaemonGone`."""
        if not self.order.asks:
            return StepAnswer.DISTRIBUTED if is_due else StepAnswer.LOCAL
        assert self._connection is not None
        before, self._launched = self._launched, _mark(self._model_vector.device)
        if before is not None:
            before.synchronize()
        return self._connection.next_step()


def _mark(device: torch.device) -> Any:
    """Something that the device reaches after all that was launched; None where calls return when all is done."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


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
