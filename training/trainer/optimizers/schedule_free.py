"""Optimisers with `train()` and `eval()`, which put other values into the model: the schedule-free ones.

Schedule-free (Defazio et al., 2024) keeps in the model y, where gradients are taken, and beside it z, which makes the
steps; `eval()` puts x = y + (1 - 1/beta) (z - y), the mean of all z, into the model. The swarm shares y: it is loaded,
exchanged, and written to files. z moves along with it (`optimizer_positions`). x is not shared: it is the mean of this
node's z alone, far less accurate than y where the nodes' data differ (digits, two nodes with five classes each: 0.28
and 0.95).
So an optimiser is in training mode while weights are loaded or exchanged. While a script evaluates the shared weights
it is in evaluation mode, where another `eval()` leaves them in the model. At the end of a run z is set to y, so that x
is y and `eval()` changes nothing any more.

The mean weighs step k with 1/k. A node that joins late would begin with 1 (an accuracy of 0.98 fell to 0.65), so `seek`
adds the weights of the steps that it has not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from p2pnode.training.trainer_link.interface import TrainerFailed


class ScheduleFree:
    """The modes and sums of weights of optimisers, inner ones too. Raises `TrainerFailed` for modes it cannot read."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = [one for one in optimizers if is_schedule_free(one)]
        self._switching = [one for one in optimizers if _switches(one)]
        #: The position of the sums of weights, in optimiser steps of the swarm.
        self.counted = 0
        for one in self._switching:
            if one not in self._optimizers or _is_training(one) is None:
                raise TrainerFailed(
                    f"{type(one).__name__} has train() and eval(), which put other values into the model, and it is "
                    "not known which of them are to be exchanged",
                    "take another optimiser; those of the packages schedulefree and pytorch_optimizer are known, by "
                    "ScheduleFree in their names (docs/own-model.md)",
                    fatal=True,
                )

    @contextmanager
    def training(self) -> Iterator[None]:
        """Inside the block the model holds y, which is exchanged."""
        switched = [one for one in self._switching if not _is_training(one)]
        for one in switched:
            one.train()
        try:
            yield
        finally:
            for one in switched:
                one.eval()

    @contextmanager
    def keeping_mode(self) -> Iterator[None]:
        """Inside the block a state may be loaded, with another mode; then the mode is as before. An error is fatal."""
        before = self._modes()
        yield
        for one, was_training in zip(self._switching, before, strict=True):
            one.train() if was_training else one.eval()

    def begin_evaluation(self) -> list[bool]:
        """Go into evaluation mode, before other weights enter the model for a while; returns which were in training."""
        modes = self._modes()
        for one in self._switching:
            one.eval()
        return modes

    def end_evaluation(self, before: list[bool], put_back: Callable[[], None]) -> None:
        """`put_back` gives the model what it held after `begin_evaluation`, which returned `before`. If the script has
        called `train()` meanwhile, it means the time after the evaluation."""
        meanwhile = self.begin_evaluation()
        put_back()
        for one, was_training, is_training in zip(self._switching, before, meanwhile, strict=True):
            if was_training or is_training:
                one.train()

    def _modes(self) -> list[bool]:
        return [bool(_is_training(one)) for one in self._switching]

    def count(self, steps: int) -> None:
        """This node has taken `steps` optimiser steps, which have added their weights themselves."""
        self.counted += steps

    def seek(self, position: int) -> None:
        """The swarm has taken `position` optimiser steps: add the weights of those that this node has missed."""
        if position > self.counted:
            for one in self._optimizers:
                for group in one.param_groups:
                    _add_weights(one, group, self.counted, position)
        self.counted = position


def is_schedule_free(optimizer: Any) -> bool:
    """By its name: there is no common base class."""
    return any("ScheduleFree" in kind.__name__ for kind in type(optimizer).__mro__)


def _switches(optimizer: Any) -> bool:
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def _is_training(optimizer: Any) -> bool | None:
    """Its mode; None if it does not say."""
    mode: bool | None = getattr(optimizer, "train_mode", optimizer.param_groups[0].get("train_mode"))
    return mode


def _add_weights(optimizer: Any, group: dict[str, Any], begin: int, end: int) -> None:
    """Add the weights of steps `begin` to `end` - 1 to the group's sum: step k has (k + 1)^r · rate^power."""
    rate = max(float(group["lr"]), float(group.get("lr_max", 0.0)))
    power = group.get("weight_lr_power", getattr(optimizer, "weight_lr_power", 2.0))
    r = group.get("r", getattr(optimizer, "r", 0.0))
    steps = float(end - begin) if not r else sum((step + 1) ** r for step in range(begin, end))
    group["weight_sum"] = group.get("weight_sum", 0.0) + steps * rate**power
