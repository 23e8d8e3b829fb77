"""`SwarmCallback` makes Lightning's `Trainer` the trainer of a node:

    trainer = L.Trainer(max_epochs=-1, callbacks=[SwarmCallback()])
    trainer.fit(module, loader)                      # p2pnode run -- python train.py

It attaches when `fit` begins, counts optimiser steps, and `fit` returns when the swarm is done. If the Trainer's own
end comes first (`max_steps`, `max_epochs`, early stopping), the node leaves the swarm.

During validation, and for the checkpoints after it, the model holds the swarm's weights of the turn. What the module
logs then as `val_...`, `valid_...` or `validation_...`, or with `/`, is reported to the swarm without the prefix.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

import p2pnode
from p2pnode.integrations.divided_data import DividedData, batch_size, mean, numbers

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities.rank_zero import rank_zero_warn
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "lightning":
        raise
    raise ImportError(
        "p2pnode.integrations.lightning needs the package lightning, which is not installed: "
        'pip install "p2pnode[lightning]"'
    ) from error

if TYPE_CHECKING:
    from p2pnode.training.trainer.attached_swarm import AttachedSwarm

#: Names under which modules log what they measure in validation.
PREFIXES = tuple(word + sign for word in ("validation", "valid", "val") for sign in "_/")


class SwarmCallback(Callback):
    """For modules with one optimiser or several. `state` and `include_frozen` are those of `p2pnode.attach`: a callback
    that unfreezes layers, as `BaseFinetuning`, needs the latter. With `share_data` the nodes divide the training data,
    if it is one `DataLoader` without a sampler of the user's own (docs/frameworks.md).

    `swarm` is what `p2pnode.attach` returned, once training has begun. `fit` raises `NotAttached` and `SwarmLost`.
    """

    def __init__(
        self, state: MutableMapping[str, Any] | None = None, *, share_data: bool = True, include_frozen: bool = False
    ) -> None:
        self.swarm: AttachedSwarm | None = None
        self._state = state
        self._include_frozen = include_frozen
        self._data = DividedData(is_wanted=share_data)
        self._validation = ExitStack()
        self._optimizer_steps = 0
        self._batches = self._samples = self._validated = 0
        self._losses: list[torch.Tensor] = []

    # --- training -----------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation.close()
        self._samples = 0
        self._losses.clear()
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.swarm = p2pnode.attach(
            pl_module,
            trainer.optimizers,
            _schedules(trainer),
            scaler,
            self._state,
            include_frozen=self._include_frozen,
        )
        self._optimizer_steps = trainer.global_step
        loader = trainer.train_dataloader
        if not trainer.overfit_batches and self._data.take(loader, self.swarm) and loader.num_workers:
            # Its workers have been given batches of the sampler before.
            iter(trainer.fit_loop._data_fetcher)  # noqa: SLF001 - as at each new epoch
        self._stop_together(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._validation.close()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        self._samples += batch_size(batch)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor):
            # Lightning has divided it, so that the losses of one optimiser step add up to their mean.
            self._losses.append(loss.detach().reshape(()) * trainer.accumulate_grad_batches)
        done, self._optimizer_steps = trainer.global_step - self._optimizer_steps, trainer.global_step
        if done:  # None while gradients are accumulated; several with manual optimisation, which `step` counts itself.
            samples = self._data.samples(self._batches, self._samples)
            self._swarm().step(samples=samples, loss=mean(self._losses))
            self._batches = self._samples = 0
            self._losses.clear()
        self._stop_together(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation.close()
        swarm = self._swarm()
        if not swarm.done:
            rank_zero_warn(
                f"The Trainer ends before the swarm, in step {swarm.step_number}, so this node leaves. "
                "Trainer(max_epochs=-1), and no early stopping, let it train to the end."
            )
            swarm.leave()

    def _stop_together(self, trainer: Trainer) -> None:
        if self._swarm().done:
            trainer.should_stop = True
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = 0

    # --- validation ---------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Before training, a few batches are validated as a check of the code.
        if self.swarm is not None and trainer.state.fn == "fit":
            self._validated = 0
            self._validation.close()
            self._validation.enter_context(self.swarm.busy("validation"))
            self._validation.enter_context(self.swarm.shared_weights())

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        self._validated += batch_size(batch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = numbers(trainer.callback_metrics, PREFIXES)
        if self.swarm is not None and trainer.state.fn == "fit" and found:
            self.swarm.evaluate(samples=self._validated, **found)

    def _swarm(self) -> AttachedSwarm:
        assert self.swarm is not None, "on_train_start comes first"
        return self.swarm


def _schedules(trainer: Trainer) -> list[Any]:
    """The schedules that count optimiser steps."""
    found = []
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau or (config.interval == "step" and config.frequency == 1):
            found.append(config.scheduler)  # `attach` refuses one that follows a metric of this node.
            continue
        rank_zero_warn(
            f"The schedule {type(config.scheduler).__name__} counts epochs of this node's own data, so the learning "
            'rates of the nodes may differ. With "interval": "step" in configure_optimizers they follow the swarm.'
        )
    return found
