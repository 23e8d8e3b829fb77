"""Pulls the model to the leaders' values after each optimiser step: the proximal term of leader SGD.

The values are those of the leaders at the last distributed step, in memory that the daemon shares. The pulls compose as
in LSGD's local step: first to the leader of the swarm, then to that of the node.
"""

from __future__ import annotations

import torch
from torch import Tensor

from p2pnode.training.trainer.vector import ModelVector
from p2pnode.training.trainer_link.interface import StepOrder, Vector


class LeaderPulls:
    """Belongs to one model. `vectors`: the values of the node's leader and, where there is one, of the swarm's,
    `float32[total]`; none where this trainer follows no leader."""

    def __init__(self, model_vector: ModelVector, vectors: tuple[Vector, ...]) -> None:
        self._model_vector = model_vector
        self._vectors = vectors
        self._pulls: list[tuple[list[Tensor], float]] = []

    @torch.no_grad()
    def begin(self, order: StepOrder, leader: Tensor | None = None) -> None:
        """A turn begins: copy what it is pulled to, to the model's device where that is another one. `leader`: the
        values of the node's leader where they are there already."""
        self._pulls = []
        vectors: list[Vector | Tensor] = [*self._vectors]
        if leader is not None:
            vectors[:1] = [leader]
        # The swarm's leader first.
        for vector, share in list(zip(vectors, (order.local_pull, order.global_pull), strict=False))[::-1]:
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
