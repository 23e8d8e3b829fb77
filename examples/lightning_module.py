"""A Lightning module in a swarm. Needs `p2pnode[lightning]`.

    p2pnode run --set training.max_steps=60 -- python examples/lightning_module.py

`fit` returns when the swarm is done; `max_epochs=-1` leaves the end to the swarm. What validation logs as `val_...` is
reported to the swarm, so `training.until=accuracy >= 0.95` works too.
"""

import lightning
import torch
from own_loop import network, spirals
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, random_split

from p2pnode.integrations.lightning import SwarmCallback


class Spirals(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = network()

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        points, which = batch
        return functional.cross_entropy(self.model(points), which)

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        points, which = batch
        self.log("val_accuracy", (self.model(points).argmax(1) == which).float().mean())

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        # "step": the schedule counts optimiser steps, and so follows the swarm on every node.
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=600)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


training, held_out = random_split(spirals(5120, seed=0), [0.8, 0.2], torch.Generator().manual_seed(0))
module = Spirals()
trainer = lightning.Trainer(
    max_epochs=-1,
    val_check_interval=50,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    callbacks=[SwarmCallback()],
)
trainer.fit(module, DataLoader(training, 32, shuffle=True), DataLoader(held_out, 256))
print(f"the shared model: accuracy {float(trainer.callback_metrics['val_accuracy']):.3f}")
