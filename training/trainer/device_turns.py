"""What a script does differently as one of several trainers of its node: before each optimiser step it asks what the
next iteration is, and after it the model is pulled to the leaders' values, the proximal term of leader SGD.

Those are the values of the leaders at the last distributed step, in memory that the daemon shares. The pulls compose as
in LSGD's local step: first to the leader of the swarm, then to that of the node.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from p2pnode.training.trainer.connection import DaemonConnection
from p2pnode.training.trainer.device_merge import DeviceMerge
from p2pnode.training.trainer.model.vector import ModelVector
from p2pnode.training.trainer_link.interface import MergeOrder, StepOrder, TrainerFailed, Vector
from p2pnode.training.trainer_link.messages import Start
from p2pnode.training.trainer_link.step_messages import StepAnswer


class RecentLosses:
    """The losses of the last batches, as many as `window` says."""

    def __init__(self) -> None:
        self._window = 0
        self._losses: deque[float] = deque()

    def add(self, losses: Iterable[float], window: int) -> None:
        """The losses of a turn; `window` 0: nobody asks for them."""
        if window != self._window:
            self._window, self._losses = window, deque(self._losses, maxlen=window)
        self._losses.extend(losses)

    def mean(self) -> float | None:
        """Their mean; None while there are fewer than the window, so that a trainer with few batches does not look
        best, and where one is not finite."""
        if not self._window or len(self._losses) < self._window:
            return None
        mean = math.fsum(self._losses) / self._window if all(map(math.isfinite, self._losses)) else math.nan
        return mean if math.isfinite(mean) else None


class LeaderPulls:
    """Belongs to one model. `vectors`: the values of the node's leader and, where there is one, of the swarm's,
    `float32[total]`; none where this trainer follows no leader."""

    def __init__(self, model_vector: ModelVector, vectors: tuple[Vector, ...]) -> None:
        self._model_vector = model_vector
        self._vectors = vectors
        self._pulls: list[tuple[list[Tensor], float]] = []

    @torch.no_grad()
    def begin(self, order: StepOrder) -> None:
        """A turn begins: copy what it is pulled to, to the model's device where that is another one."""
        self._pulls = []
        # The swarm's leader first.
        for vector, share in list(zip(self._vectors, (order.local_pull, order.global_pull), strict=False))[::-1]:
            if share:
                self._pulls.append((self._model_vector.parts_of(vector), share))

    @property
    def moves(self) -> bool:
        """Whether `apply` changes the model in this turn."""
        return bool(self._pulls)

    @torch.no_grad()
    def apply(self) -> None:
        """An optimiser step was taken: x ← (1 − p) x + p · leader, for each leader."""
        for parts, share in self._pulls:
            for (_, tensor), part in zip(self._model_vector.named_tensors(), parts, strict=True):
                tensor.lerp_(part, share) if tensor.dtype == part.dtype else tensor.lerp_(part.to(tensor.dtype), share)


class DeviceTurns:
    """Belongs to one script; does nothing on a rank without a connection and for a single trainer."""

    def __init__(self, model_vector: ModelVector, connection: DaemonConnection | None) -> None:
        self._model_vector = model_vector
        self._connection = connection
        self._leaders = LeaderPulls(model_vector, ())
        self._losses = RecentLosses()
        self._merge = DeviceMerge(model_vector)
        self._order: StepOrder | None = None

    def follow(self, leaders: tuple[Vector, ...]) -> None:
        """The values to which turns may pull the model."""
        self._leaders = LeaderPulls(self._model_vector, leaders)

    def ordered(self, order: StepOrder) -> None:
        """The daemon has ordered this turn."""
        self._order = order

    @property
    def asks(self) -> bool:
        """Whether the daemon says before each optimiser step what is next."""
        return self._order is not None and self._order.asks

    @property
    def done(self) -> int:
        """Optimiser steps of the present step of the swarm in earlier turns."""
        return 0 if self._order is None else self._order.done

    @property
    def known_step(self) -> int:
        """The step whose shared values the turn began with; 0 for a trainer that is alone on its node."""
        return self._order.known_step if self._order is not None else 0

    def load(self, vector: Vector, delta: Vector) -> None:
        """Load what a turn begins with, or what the run has ended with."""
        self._merge.load(self._order, vector, delta)

    def report(self, delta: Vector) -> bool:
        """Write the delta of the turn, or keep it for a merge; see `DeviceMerge.report`."""
        return self._merge.report(self._order, delta)

    def merge(self, order: MergeOrder, delta: Vector) -> bool:
        """See `DeviceMerge.merge`."""
        return self._merge.merge(order, delta)

    def begin(self) -> None:
        """The weights of the turn are loaded."""
        if self._order is not None:
            self._leaders.begin(self._order)

    @property
    def moves(self) -> bool:
        """Whether the model is pulled to leaders in this turn."""
        return self._leaders.moves

    def stepped(self, loss: float | Tensor) -> None:
        """The script has taken an optimiser step."""
        self._leaders.apply()
        if self._order is not None and self._order.loss_window:
            self._losses.add([float(loss)], self._order.loss_window)

    def recent_loss(self) -> float | None:
        return self._losses.mean()

    def next_step(self) -> StepAnswer:
        """Ask. Raises `DaemonGone`."""
        assert self._connection is not None
        return self._connection.next_step()


def refuse_ranks(start: Start, ranks: int) -> None:
    """Raises `TrainerFailed` for a script with ranks of its own on a node with several trainers."""
    if start.device_count > 1 and ranks > 1:
        raise TrainerFailed(
            "training.devices starts a process for each device, and this script has ranks of its own (torchrun)",
            "use one of the two: leave training.devices out, or start the script without torchrun",
            fatal=True,
        )
