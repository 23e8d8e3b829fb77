"""Finds ranks that train apart. Only rank 0's weights are exchanged: what another rank trains for itself is lost, and
gradients that are averaged over unequal weights belong to no model.

Every rank gives, at the end of a turn, its optimiser steps, the scaler's scale, the learning rate, and by how much a
few of its weights have moved. Rank 0 compares. Ranks under DistributedDataParallel are equal to the bit, or to the
rounding of unlike devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from p2pnode.training.trainer.script_arguments import ScriptArguments

#: Of so many parameters, spread over the model, so many values are compared.
TENSORS = 4
VALUES = 64
#: Moves that differ by more than this share of the larger one are no rounding.
SHARE = 0.1
APART_HINT = "wrap the model in DistributedDataParallel before attach, and let all ranks take the same steps"
#: What is compared beside the weights.
FACTS = ("has taken {:g} optimiser steps in a turn", "has a scaler at {:g}", "has a learning rate of {:g}")


class RankAgreement:
    """One rank's part. `tensors` are those that are exchanged; none for a rank that is alone, which says nothing."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        alike = [tensor for tensor in tensors if tensor.device == tensors[0].device]
        chosen = [alike[i * len(alike) // TENSORS] for i in range(TENSORS)] if alike else []
        steps = [max(1, tensor.numel() // VALUES) for tensor in chosen]
        self._chosen = [(tensor, slice(0, VALUES * step, step)) for tensor, step in zip(chosen, steps, strict=True)]
        self._begun: Tensor | None = None

    def begin(self) -> None:
        """A turn begins, with the weights that are in the model now."""
        if self._chosen:
            self._begun = self._look()

    def statement(self, steps: int, given: ScriptArguments) -> list[float]:
        """What this rank says at the end of a turn, of the same length on all ranks."""
        if self._begun is None:
            return []
        scale = given.scaler.get_scale() if given.scaler is not None else 0.0
        moves: list[float] = (self._look() - self._begun).tolist()
        return [float(steps), scale, float(given.optimizers[0].param_groups[0]["lr"]), *moves]

    @torch.no_grad()
    def _look(self) -> Tensor:
        return torch.cat([tensor.reshape(-1)[places] for tensor, places in self._chosen]).float()


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
