"""A swarm in one process, without its daemons: nodes that train a small model, and merge their deltas after each turn.
The merged values enter while the next turn is trained.

What loads the weights is what a script's node has, `training.trainer.model.weight_loads`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from p2pnode.training.trainer.model.vector import ModelVector
from p2pnode.training.trainer.model.weight_loads import WeightLoads

CLASSES, INPUTS = 8, 16


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """2048 inputs and their classes: which of eight random centres each is nearest to."""
    generator = torch.Generator().manual_seed(seed)
    centres = 1.2 * torch.randn(CLASSES, INPUTS, generator=generator)
    classes = torch.randint(0, CLASSES, (2048,), generator=generator)
    return centres[classes] + torch.randn(2048, INPUTS, generator=generator), classes


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(INPUTS, 32), nn.ReLU(), nn.Linear(32, CLASSES))


class LocalNode:
    """`optimizers` are made for its model by `make`; `on_load` may be made from them."""

    def __init__(self, seed: int, make: Callable[[nn.Module], Sequence[Any]], on_load: Any = None) -> None:
        self.model = network(seed)
        self.optimizers = make(self.model)
        self.vector = ModelVector(self.model)
        self.loads = WeightLoads(self.vector, self.optimizers, on_load(self.optimizers) if on_load else None)
        self.delta = np.zeros(self.vector.layout.total, np.float32)
        for optimizer in self.optimizers:
            getattr(optimizer, "train", lambda: None)()

    def step(self, inputs: torch.Tensor, classes: torch.Tensor, workers: int) -> None:
        def loss() -> torch.Tensor:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            found = functional.cross_entropy(self.model(inputs), classes)
            found.backward()
            return found

        if not isinstance(self.optimizers[0], torch.optim.LBFGS):
            loss()
        for optimizer in self.optimizers:
            optimizer.step(*[loss] if isinstance(optimizer, torch.optim.LBFGS) else [])
        self.loads.stepped(1, workers)


class LocalSwarm:
    """`differs`: each node has classes of its own. `late`: the optimiser steps of a turn before the values of the last
    turn enter; those of the last turn of a run enter at once."""

    def __init__(
        self, seed: int, count: int, *, differs: bool, local_steps: int, batch: int = 32, late: int = 0
    ) -> None:
        self.seed, self.local_steps, self.batch = seed, local_steps, batch
        self.late = min(late, local_steps - 1)
        self.nodes: list[LocalNode] = []
        inputs, classes = data(seed)
        own = classes if differs else torch.arange(len(classes))
        parts = [torch.nonzero(own[:1536] % count == index).flatten() for index in range(count)]
        self._data = [(inputs[part], classes[part]) for part in parts]
        self._test = inputs[1536:], classes[1536:]
        self._generators = [torch.Generator().manual_seed(100 * seed + index) for index in range(count)]
        self.turn = 0

    def add(self, make: Callable[[nn.Module], Sequence[Any]], on_load: Any = None) -> LocalNode:
        node = LocalNode(self.seed, make, on_load)
        if not self.nodes:
            self.value = np.zeros(node.vector.layout.total, np.float32)
            self._momentum = np.zeros_like(self.value)
            node.vector.read(self.value)
        self.nodes.append(node)
        self._load(node)
        return node

    def _load(self, node: LocalNode, *, ends: bool = False) -> None:
        with node.loads.load(ends=ends):
            node.vector.load(self.value)

    def _enter(self, node: LocalNode) -> None:
        with node.loads.load():
            node.vector.enter(torch.from_numpy(self.value))

    def run(
        self, turns: int, rate: float = 0.7, momentum: float = 0.5, *, check: bool = True, ends: bool = False
    ) -> None:
        """Raises `TrainerFailed` as `WeightLoads.check` does. The owner's rule is that of the settings."""
        for turn in range(turns):
            for node, (inputs, classes), generator in zip(self.nodes, self._data, self._generators, strict=False):
                node.loads.seek(self.turn * self.local_steps)
                for step in range(self.local_steps):
                    if turn and step == self.late:
                        self._enter(node)
                    chosen = torch.randint(0, len(inputs), (self.batch or len(inputs),), generator=generator)
                    rows = chosen if self.batch else slice(None)
                    node.step(inputs[rows], classes[rows], len(self.nodes))
                if check:
                    node.loads.check()
                node.vector.cut(node.delta)
                node.vector.add_to_base(torch.from_numpy(node.delta))
            mean = np.mean([node.delta for node in self.nodes], axis=0)
            self._momentum = momentum * self._momentum + mean
            self.value += rate * (mean + momentum * self._momentum)
            self.turn += 1
        for node in self.nodes:
            if ends:
                self._load(node, ends=True)
            else:
                self._enter(node)

    @torch.no_grad()
    def accuracy(self, node: LocalNode) -> float:
        """Of what is in the model of the node."""
        inputs, classes = self._test
        return float((node.model(inputs).argmax(1) == classes).float().mean())
