"""`SwarmCallback` makes Hugging Face's `Trainer` the trainer of a node:

    trainer = Trainer(model, args, train_dataset=data, callbacks=[SwarmCallback()])
    trainer.train()                                  # p2pnode run -- python finetune.py

It attaches when `train()` has made optimiser and schedule, counts optimiser steps, and `train()` returns when the swarm
is done. If the Trainer's own end comes first (`max_steps`, its epochs, early stopping), the node leaves the swarm.
Between two steps, for evaluation and for the Trainer's checkpoints, the model holds the swarm's weights of the turn;
what is evaluated is reported to the swarm without the prefix `eval_`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import MutableMapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

import p2pnode
from p2pnode.integrations.divided_data import DividedData, batch_size, mean, numbers

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "transformers":
        raise
    raise ImportError(
        "p2pnode.integrations.transformers needs the package transformers, which is not installed: "
        'pip install "p2pnode[transformers]"'
    ) from error

if TYPE_CHECKING:
    from p2pnode.training.trainer.attached_swarm import AttachedSwarm

#: What an evaluation says about itself, not about the model.
_TIMINGS = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "jit_compilation_time")

_logger = logging.getLogger("p2pnode")


class SwarmCallback(TrainerCallback):
    """For one `Trainer`, and one call of `train()` at a time. `state` and `include_frozen` are those of
    `p2pnode.attach`. With `share_data` the nodes divide the `train_dataset`, if the Trainer's own sampler reads it
    (docs/frameworks.md).

    `swarm` is what `p2pnode.attach` returned, once training has begun. `train()` raises `NotAttached` and `SwarmLost`.
    """

    def __init__(
        self, state: MutableMapping[str, Any] | None = None, *, share_data: bool = True, include_frozen: bool = False
    ) -> None:
        self.swarm: AttachedSwarm | None = None
        self._state = state
        self._include_frozen = include_frozen
        self._data = DividedData(is_wanted=share_data)
        self._is_training = False
        self._training = ExitStack()
        self._between_steps = ExitStack()
        self._batches = self._samples = 0
        self._losses: list[torch.Tensor] = []
        self._loss_is_sum = False

    # --- training -----------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model: torch.nn.Module = kwargs["model"]
        # `auto_find_batch_size` begins anew in the middle of a step.
        self._between_steps.close()
        self._training.close()
        self._samples = 0
        self._losses.clear()
        optimizer, schedule = kwargs["optimizer"], kwargs["lr_scheduler"]
        self.swarm = p2pnode.attach(model, optimizer, schedule, state=self._state, include_frozen=self._include_frozen)
        if self._data.take(kwargs["train_dataloader"], self.swarm):
            args.ignore_data_skip = True  # the swarm knows what is trained
        hook = model.register_forward_hook(self._note_forward, with_kwargs=True)
        self._training.callback(hook.remove)
        self._is_training = True
        if self.swarm.done:
            _logger.warning("train() was called when this node had finished or left its swarm: nothing is trained.")
        if args.eval_on_start:
            self._pause()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._between_steps.close()

    def on_pre_optimizer_step(self, *_: Any, **kwargs: Any) -> None:
        if self._swarm().done:
            # The run had ended before this node could take part, and the Trainer stops only after one step.
            kwargs["model"].zero_grad(set_to_none=True)

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self._batches += 1

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        swarm = self._swarm()
        swarm.step(samples=self._data.samples(self._batches + 1, self._samples), loss=self._loss(args))
        self._batches = self._samples = 0
        self._losses.clear()
        self._stop_together(control)
        if swarm.done:
            # As the Trainer does at its own end. With the strategy "epoch" it will, because the epoch ends now.
            control.should_evaluate |= args.eval_strategy == "steps"
            control.should_save |= args.save_strategy == "steps"
        if control.should_evaluate or control.should_save:
            self._pause()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._stop_together(control)
        if control.should_evaluate or control.should_save:
            self._pause()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._between_steps.close()
        self._training.close()
        control.should_training_stop = True
        self._stop_together(control)
        self._is_training = False

    def _stop_together(self, control: TrainerControl) -> None:
        """The Trainer stops when the swarm is done, and the node leaves when the Trainer stops."""
        swarm = self._swarm()
        if control.should_training_stop and not swarm.done:
            _logger.warning(
                "The Trainer ends before the swarm, in step %d, so this node leaves. TrainingArguments(max_steps=...) "
                "of training.max_steps × training.local_steps, and no early stopping, let it train to the end.",
                swarm.step_number,
            )
            swarm.leave()
        control.should_training_stop = swarm.done

    # --- evaluation and checkpoints -----------------------------------------------------------------------------

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.swarm is None or not self._is_training:
            return
        found = numbers(kwargs["metrics"], ("eval_",))
        found = {name: value for name, value in found.items() if not name.endswith(_TIMINGS)}
        samples = getattr(kwargs["eval_dataloader"], "dataset", ())
        if found:
            self.swarm.evaluate(samples=len(samples) if hasattr(samples, "__len__") else 0, **found)

    def _pause(self) -> None:
        """Until the next step begins the model holds the swarm's weights, and silence is no hang."""
        swarm = self._swarm()
        self._between_steps.close()
        self._between_steps.enter_context(swarm.busy("evaluation and checkpoint of the Trainer"))
        self._between_steps.enter_context(swarm.shared_weights())

    # --- samples and loss ---------------------------------------------------------------------------------------

    def _note_forward(self, model: torch.nn.Module, inputs: Any, kwargs: dict[str, Any], output: Any) -> None:
        """No event of a callback has the batch or its loss: they are read from the model's own call."""
        if not model.training:
            return
        self._samples += batch_size(kwargs) or batch_size(inputs)
        # Where the Trainer passes the number of tokens of all batches of a step, their losses add up to its mean.
        self._loss_is_sum = kwargs.get("num_items_in_batch") is not None
        loss = output.get("loss") if isinstance(output, dict) else output[0] if isinstance(output, tuple) else None
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach().reshape(()))

    def _loss(self, args: TrainingArguments) -> float | torch.Tensor:
        if not self._losses:
            return math.nan
        if not self._loss_is_sum:
            return mean(self._losses)
        return torch.stack(self._losses).sum() * (args.world_size if args.average_tokens_across_devices else 1)

    def _swarm(self) -> AttachedSwarm:
        assert self.swarm is not None, "on_train_begin comes first"
        return self.swarm
