"""Coordinates the processes that train one replica (torchrun with DistributedDataParallel); rank 0 is connected.

Every rank calls `swarm.step` equally often. At the end of a turn rank 0 reports and waits for the daemon, and then
broadcasts the next turn. All map the vectors that the daemon shares, so they are processes of one host. With a single
process all of this does nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed
from torch import Tensor
from torch.amp import GradScaler

from p2pnode.training.trainer.connection import MAX_DESCRIPTORS, DaemonGone
from p2pnode.training.trainer_link.interface import StepOrder, TrainerFailed

#: Of so many parameters, spread over the model, so many values are compared.
TENSORS = 4
VALUES = 64
#: Moves that differ by more than this share of the larger one are no rounding.
SHARE = 0.1
APART_HINT = "wrap the model in DistributedDataParallel before attach, and let all ranks take the same steps"
#: What is compared beside the weights.
FACTS = ("has taken {:g} optimiser steps in a turn", "has a scaler at {:g}", "has a learning rate of {:g}")

Shared = TypeVar("Shared")


class Signal(IntEnum):
    """What rank 0 tells the ranks that wait for the next order: to wait on, so that their collective does not time out;
    that the order comes; that the daemon has ended; to save their state; to apply what it is about to apply
    (`training.trainer.model.value_entry`); or to describe the model with it."""

    STILL_WAITING = 0
    ORDER = 1
    LOST = 2
    SAVE = 3
    VALUES = 4
    DESCRIBE = 5


class Combined(NamedTuple):
    """What all ranks report of a turn. `statements` are by rank."""

    loss: float
    metrics: dict[str, float]
    samples: int
    statements: list[list[float]]


class Ranks:
    """This process, number `rank` of `count`; `device` is where the process group requires its tensors. By default it
    is alone."""

    def __init__(self, rank: int = 0, count: int = 1, device: str = "cpu") -> None:
        self.rank = rank
        self.count = count
        self._device = device

    @classmethod
    def find(cls) -> Ranks:
        """Ask `torch.distributed`. Raises `TrainerFailed` if torchrun's variables are set but it is not initialised."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            backend = str(torch.distributed.get_backend())
            device = f"cuda:{torch.cuda.current_device()}" if "nccl" in backend else "cpu"
            return cls(torch.distributed.get_rank(), torch.distributed.get_world_size(), device)
        if int(os.environ.get("WORLD_SIZE") or 1) > 1:
            raise TrainerFailed(
                f"this script runs as {os.environ['WORLD_SIZE']} processes (WORLD_SIZE) that do not know of each other",
                "call torch.distributed.init_process_group() before p2pnode.attach()",
                fatal=True,
            )
        return cls()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def lead(self, order: StepOrder | None) -> None:
        """On rank 0: broadcast the next order; None is the end."""
        self.signal(Signal.ORDER)
        self.share(order)

    def signal(self, signal: Signal) -> None:
        """On rank 0: let the other ranks, which wait for the next order, do something before it."""
        self.share_number(signal)

    def follow(self, actions: Mapping[Signal, Callable[[], object]]) -> StepOrder | None:
        """On the other ranks: wait for the next order; None is the end. What rank 0 does together with all is done
        meanwhile. Raises `DaemonGone`."""
        while (signal := Signal(self.share_number(0))) is not Signal.ORDER:
            if signal is Signal.LOST:
                raise DaemonGone
            if signal in actions:
                actions[signal]()
        return self.share(None)

    def share(self, settings: Shared) -> Shared:
        """On all ranks: what rank 0 has."""
        if self.count == 1:
            return settings
        found = [settings]
        torch.distributed.broadcast_object_list(found, src=0, device=torch.device(self._device))
        return found[0]

    def gather(self, value: Shared) -> list[Shared]:
        """On all ranks: what each of them gives, by rank."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(found, value)
        return found

    def require_equal(self, layout_digest: str, fixed: dict[str, str]) -> None:
        """On all ranks: raise `TrainerFailed` on all if one has another model, or other values in the tensors that are
        not exchanged, whose fingerprints are given."""
        found = self.gather((layout_digest, fixed))
        first_layout, first = found[0]
        for rank, (layout, other) in enumerate(found):
            names = [name for name in sorted(first.keys() | other.keys()) if first.get(name) != other.get(name)]
            if layout != first_layout or names:
                what = "another model" if layout != first_layout else f"other values of {names[0]}"
                raise TrainerFailed(
                    f"rank {rank} has {what} than rank 0",
                    "build the same model on all ranks, and wrap it in DistributedDataParallel before attach",
                    fatal=True,
                )

    def share_descriptors(self, descriptors: Sequence[int]) -> tuple[int, ...]:
        """On all ranks: descriptors of the open files of rank 0. Raises `TrainerFailed` on all where one of them is on
        another host."""
        if self.count == 1:
            return tuple(descriptors)
        with contextlib.ExitStack() as opened:
            own = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            path = ""
            if self.is_first:
                path = f"{opened.enter_context(tempfile.TemporaryDirectory(prefix='p2pnode-'))}/ranks"
                own.bind(path)
                own.listen(self.count)
            path = self.share(path)
            elsewhere = [rank for rank, here in enumerate(self.gather(Path(path).exists())) if not here]
            if elsewhere:
                raise TrainerFailed(
                    f"rank {elsewhere[0]} runs on another host than rank 0, and the ranks of a node share memory",
                    "start one node per host, each with the processes of that host",
                    fatal=True,
                )
            if not self.is_first:
                own.connect(path)
                return tuple(socket.recv_fds(own, 1, MAX_DESCRIPTORS)[1])
            for _ in range(1, self.count):
                with own.accept()[0] as other:
                    socket.send_fds(other, [b"1"], descriptors)
            return tuple(descriptors)

    def combine(self, means: dict[str, float], samples: int, statement: Sequence[float] = ()) -> Combined:
        """Mean loss, mean metrics and total samples of the turn over all ranks, which give the same names, and what
        each rank has stated, in as many numbers."""
        names = sorted(means)
        rows = self._gather_numbers([*(means[name] for name in names), float(samples), *statement])
        combined = {
            name: sum(values) / self.count for name, values in zip(names, zip(*rows, strict=True), strict=False)
        }
        total = round(sum(row[len(names)] for row in rows))
        return Combined(combined.pop("loss", math.nan), combined, total, [row[len(names) + 1 :] for row in rows])

    def _gather_numbers(self, values: list[float]) -> list[list[float]]:
        if self.count == 1:
            return [values]
        mine = torch.tensor(values, dtype=torch.float64, device=self._device)
        found = [torch.empty_like(mine) for _ in range(self.count)]
        torch.distributed.all_gather(found, mine)
        return [[float(value) for value in row] for row in torch.stack(found).cpu()]

    def gather_numbers(self, number: float) -> list[float]:
        """On all ranks: what each of them gives, by rank. No rank returns before all have called it."""
        return [row[0] for row in self._gather_numbers([number])]

    def share_number(self, number: int) -> int:
        """On all ranks: the number that rank 0 gives, by one small collective."""
        if self.count == 1:
            return number
        tensor = torch.tensor(number, device=self._device)
        torch.distributed.broadcast(tensor, src=0)
        return int(tensor)


class RankAgreement:
    """Finds ranks that train apart. Each writes its part of what all hold: what it trains for itself in the others'
    parts is lost, and gradients that are averaged over unequal weights belong to no model.

    Every rank gives, at the end of a turn, its optimiser steps, the scaler's scale, the learning rate, and by how much
    a few of its weights have moved. Rank 0 compares. Ranks under DistributedDataParallel are equal to the bit, or to
    the rounding of unlike devices. `tensors` are those that are exchanged and whole on each rank; None for a rank that
    is alone, which says nothing.
    """

    def __init__(self, tensors: Sequence[Tensor] | None) -> None:
        self._is_alone = tensors is None
        tensors = tensors or []
        alike = [tensor for tensor in tensors if tensor.device == tensors[0].device]
        chosen = [alike[i * len(alike) // TENSORS] for i in range(TENSORS)] if alike else []
        steps = [max(1, tensor.numel() // VALUES) for tensor in chosen]
        self._chosen = [(tensor, slice(0, VALUES * step, step)) for tensor, step in zip(chosen, steps, strict=True)]
        self._begun: Tensor | None = None

    def begin(self) -> None:
        """A turn begins, with the weights that are in the model now."""
        if not self._is_alone:
            self._begun = self._look()

    def statement(self, steps: int, scaler: GradScaler | None, rate: float) -> list[float]:
        """What this rank says at the end of a turn, of the same length on all ranks."""
        if self._begun is None:
            return []
        scale = scaler.get_scale() if scaler is not None else 0.0
        moves: list[float] = (self._look() - self._begun).tolist()
        return [float(steps), scale, rate, *moves]

    @torch.no_grad()
    def _look(self) -> Tensor:
        parts = [tensor.reshape(-1)[places].float() for tensor, places in self._chosen]
        return torch.cat(parts) if parts else torch.zeros(0)


def difference(statements: Sequence[Sequence[float]]) -> str:
    """How another rank differs from rank 0, by what they have said; empty where none does."""
    first = np.asarray(statements[0])
    for rank, statement in enumerate(statements[1:], 1):
        other = np.asarray(statement)
        for index, fact in enumerate(FACTS):
            if other[index] != first[index]:
                return f"rank {rank} {fact.format(other[index])}, and rank 0 {fact.format(first[index])}"
        mine, theirs = first[len(FACTS) :], other[len(FACTS) :]
        finite = np.isfinite(mine)
        if not np.array_equal(finite, np.isfinite(theirs)):
            return f"the weights of rank {rank} and those of rank 0 are not finite in the same places"
        gap = float(np.linalg.norm(mine[finite] - theirs[finite]))
        if gap > SHARE * max(float(np.linalg.norm(mine[finite])), float(np.linalg.norm(theirs[finite]))):
            return f"rank {rank} trains its weights to other values than rank 0"
    return ""
