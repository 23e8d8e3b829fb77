"""`SwarmCallback` makes Lightning's `Trainer` the trainer of a node:

    trainer = L.Trainer(max_epochs=-1, callbacks=[SwarmCallback()])
    trainer.fit(module, loader)                      # p2pnode run -- python train.py

The callback attaches to the node when `fit` begins, and counts optimiser steps. `fit` returns when the swarm is done.
If the Trainer ends earlier (by `max_steps`, `max_epochs` or early stopping), the node leaves the swarm.

During validation the model holds the swarm's weights, without what this node has trained since its last exchange. The
model keeps them until the next training batch, so that the checkpoints which Lightning writes after a validation have
the validated weights. The callback reports to the swarm every metric that the module logs during validation under a
name that begins with `val`, `valid` or `validation` and `_` or `/`. It reports the name without that prefix.
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

#: With these prefixes modules log metrics of validation. The callback removes the prefix.
PREFIXES = tuple(word + sign for word in ("validation", "valid", "val") for sign in "_/")


class SwarmCallback(Callback):
    """A callback for modules with one or more optimisers.

    `state` and `include_frozen` are passed to `p2pnode.attach`; `include_frozen` is needed beside a callback that
    unfreezes layers, such as `BaseFinetuning`. With `share_data` the nodes divide the training data among them, if it
    is one `DataLoader` without a custom sampler (docs/frameworks.md).

    When training has begun, `swarm` is the result of `p2pnode.attach`. `fit` raises `NotAttached` and `SwarmLost`.
    """

    def __init__(
        self, state: MutableMapping[str, Any] | None = None, *, share_data: bool = True, include_frozen: bool = False
    ) -> None:
        self.swarm: AttachedSwarm | None = None
        self._state = state
        self._include_frozen = include_frozen
        self._data = DividedData(is_wanted=share_data)
        #: What a validation opens; closed before training goes on.
        self._validation = ExitStack()
        self._validated_samples = 0
        #: `Trainer.global_step` after the last batch.
        self._optimizer_steps = 0
        #: Since the last optimiser step.
        self._batches = self._samples = 0
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
            # The worker processes of the loader already have batches of the replaced sampler: begin a new iteration.
            iter(trainer.fit_loop._data_fetcher)  # noqa: SLF001 - Lightning does this at each new epoch
        self._stop_with_the_swarm(trainer)

    def on_train_batch_start(self, *_: Any) -> None:
        self._validation.close()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        self._samples += batch_size(batch)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor):
            # Lightning has divided the loss by this number: the losses of an optimiser step add up to their mean.
            self._losses.append(loss.detach().reshape(()) * trainer.accumulate_grad_batches)
        new_steps = trainer.global_step - self._optimizer_steps
        self._optimizer_steps = trainer.global_step
        # A batch has no optimiser step while gradients are accumulated, and may have several with manual optimisation.
        # One call is enough for several, because `AttachedSwarm.step` counts the steps of the optimisers itself.
        if new_steps:
            samples = self._data.samples(self._batches, self._samples)
            self._swarm().step(samples=samples, loss=mean(self._losses))
            self._batches = self._samples = 0
            self._losses.clear()
        self._stop_with_the_swarm(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation.close()
        swarm = self._swarm()
        if not swarm.done:
            rank_zero_warn(
                f"The Trainer ends before the swarm, in step {swarm.step_number}, so this node leaves the swarm. "
                "To train to the end, use Trainer(max_epochs=-1) without early stopping."
            )
            swarm.leave()

    def _stop_with_the_swarm(self, trainer: Trainer) -> None:
        """Let `fit` return if the swarm is done, even before Lightning's minimum of epochs or steps."""
        if self._swarm().done:
            trainer.should_stop = True
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = 0

    # --- validation ---------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # There is no swarm yet in Lightning's sanity check, which validates a few batches before training begins.
        if self.swarm is not None and trainer.state.fn == "fit":
            self._validated_samples = 0
            self._validation.close()
            self._validation.enter_context(self.swarm.busy("validation"))
            self._validation.enter_context(self.swarm.shared_weights())

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        self._validated_samples += batch_size(batch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = numbers(trainer.callback_metrics, PREFIXES)
        if self.swarm is not None and trainer.state.fn == "fit" and metrics:
            self.swarm.evaluate(samples=self._validated_samples, **metrics)

    def _swarm(self) -> AttachedSwarm:
        assert self.swarm is not None, "on_train_start comes first"
        return self.swarm


def _schedules(trainer: Trainer) -> list[Any]:
    """The learning rate schedules that the swarm keeps in step: those that Lightning advances at each optimiser step.

    Schedules that follow a metric are included, because `attach` refuses them with a message. Others cause a warning.
    """
    schedules = []
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau or (config.interval == "step" and config.frequency == 1):
            schedules.append(config.scheduler)
            continue
        rank_zero_warn(
            f"The schedule {type(config.scheduler).__name__} counts epochs of this node's own data, so the learning "
            'rates of the nodes may differ. With "interval": "step" in configure_optimizers they follow the swarm.'
        )
    return schedules
