"""A Lightning module whose parameters are divided over the processes of a machine (FSDP2). Needs `p2pnode[lightning]`.

    p2pnode run --set training.max_steps=60 -- torchrun --nproc-per-node 2 examples/lightning_fsdp.py

The vector of the swarm is that of the whole model, so other nodes may divide it otherwise, or not at all: this module
without `ModelParallelStrategy`, on one device, is a node of the same swarm.
"""

import os

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from own_loop import network, spirals
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader

from p2pnode.integrations.lightning import SwarmCallback


class Spirals(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = network()

    def configure_model(self) -> None:
        for layer in self.model:
            if list(layer.parameters()):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        points, which = batch
        return functional.cross_entropy(self.model(points), which)

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        points, which = batch
        self.log("val_accuracy", (self.model(points).argmax(1) == which).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


processes = int(os.environ["WORLD_SIZE"])  # set by torchrun
trainer = lightning.Trainer(
    max_epochs=-1,
    devices=processes,
    strategy=ModelParallelStrategy(data_parallel_size=processes, tensor_parallel_size=1),
    val_check_interval=50,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    callbacks=[SwarmCallback()],
)
trainer.fit(Spirals(), DataLoader(spirals(4096, seed=0), 32, shuffle=True), DataLoader(spirals(1024, seed=1), 256))
if trainer.is_global_zero:
    print(f"the shared model: accuracy {float(trainer.callback_metrics['val_accuracy']):.3f}")
