"""Several processes that train one replica together (torchrun with DistributedDataParallel): rank 0 speaks for all.

Every rank calls `swarm.step` equally often. At the end of a turn rank 0 reports, waits for the daemon, and tells the
others: first what comes next, then the weights. Without `torch.distributed` all of this is nothing.
"""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import torch
import torch.distributed

from training.trainer.connection import DaemonGone
from training.trainer.vector import ModelVector
from training.trainer_link.interface import TrainerFailed

_STILL_WAITING, _TURN, _DONE, _LOST = 0.0, 1.0, 2.0, 3.0


class Turn(NamedTuple):
    """One turn of local training, as the daemon orders it; see `StepOrder`."""

    step: int
    local_steps: int
    workers: float
    is_first: bool


class Ranks:
    """This process among `count`, as number `rank`; `device` is where the process group's tensors have to be."""

    def __init__(self, rank: int, count: int, device: str) -> None:
        self.rank = rank
        self.count = count
        self._device = device

    @classmethod
    def find(cls) -> Ranks:
        """By `torch.distributed`. Raises `TrainerFailed` where torchrun's variables are set and it is not ready."""
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
        return cls(0, 1, "cpu")

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def lead(self, turn: Turn | None) -> None:
        """Rank 0: tell the others what comes next; None is the end."""
        if turn is None:
            self._tell(_DONE, Turn(0, 0, 0.0, is_first=False))
        else:
            self._tell(_TURN, turn)

    def lead_away(self) -> None:
        """Rank 0: the daemon is gone, and the others have to know."""
        self._tell(_LOST, Turn(0, 0, 0.0, is_first=False))

    def still_waiting(self) -> None:
        """Rank 0: nothing yet. Keeps the others' collective from timing out."""
        self._tell(_STILL_WAITING, Turn(0, 0, 0.0, is_first=False))

    def follow(self) -> Turn | None:
        """The other ranks: what comes next. Raises `DaemonGone`."""
        while True:
            said = self._exchange([0.0] * 5)
            if said[0] == _TURN:
                return Turn(int(said[1]), int(said[2]), said[3], bool(said[4]))
            if said[0] == _DONE:
                return None
            if said[0] == _LOST:
                raise DaemonGone

    def share_weights(self, vector: ModelVector) -> None:
        """All ranks: take over rank 0's base."""
        if self.count > 1:
            torch.distributed.broadcast(vector.base, src=0)
            if not self.is_first:
                vector.load_base()

    def combine(self, means: dict[str, float], samples: int) -> tuple[float, dict[str, float], int]:
        """Mean loss, mean metrics and all samples of the turn, over the ranks; all give the same names."""
        names = sorted(means)
        values = torch.tensor([*(means[name] for name in names), float(samples)], dtype=torch.float64)
        if self.count > 1:
            values = values.to(self._device)
            torch.distributed.all_reduce(values)
            values = values.cpu()
        combined = {name: float(value) / self.count for name, value in zip(names, values, strict=False)}
        return combined.pop("loss", math.nan), combined, round(float(values[-1]))

    def _tell(self, what: float, turn: Turn) -> None:
        self._exchange([what, float(turn.step), float(turn.local_steps), turn.workers, float(turn.is_first)])

    def _exchange(self, values: list[float]) -> list[float]:
        if self.count == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        torch.distributed.broadcast(tensor, src=0)
        return [float(value) for value in tensor.cpu()]
