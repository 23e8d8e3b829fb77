"""A task class, instead of a loop of your own: you write model, batches, loss and evaluation, p2pnode has the loop.

    cd examples && p2pnode start --task task_class:Spirals --set training.max_steps=60

The protocol, with what each method may return, is described in training/tasks/task.py.
"""

from collections.abc import Iterator
from typing import Any

import torch
from own_loop import accuracy, network, spirals
from torch import Tensor, nn
from torch.nn import functional

from p2pnode.training.tasks.task import TrainSpec


class Spirals:
    """Two spirals; `options.batch` is the batch size (`--set 'training.options={batch = 64}'`)."""

    version = "1"  # Nodes with different versions refuse each other.

    def __init__(self, options: dict[str, Any], *, data_dir: str, seed: int, node_seed: int, device: str) -> None:
        self.batch = int(options.get("batch", 32))
        self.device = device
        self.training, self.held_out = spirals(4096, seed=0), spirals(1024, seed=1)
        # Another order on each node, and not the same one again after a restart.
        self.generator = torch.Generator().manual_seed(node_seed)

    def build(self) -> TrainSpec:
        model = network().to(self.device)
        return TrainSpec(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    def batches(self) -> Iterator[list[Tensor]]:
        while True:
            chosen = torch.randint(0, len(self.training), (self.batch,), generator=self.generator)
            yield [values[chosen].to(self.device) for values in self.training.tensors]

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        points, which = batch
        return functional.cross_entropy(model(points), which)

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]:
        return {"accuracy": accuracy(model, self.held_out)}, len(self.held_out)
