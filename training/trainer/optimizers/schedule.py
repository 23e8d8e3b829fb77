"""The learning rate's schedule as a function of the swarm's step, so that late joiners have the same rate.

Before step `s` the scheduler is at `(s − 1) × local_steps` optimiser steps, whatever this node has done before.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from p2pnode.training.trainer.connection import Warn
from p2pnode.training.trainer_link.interface import TrainerFailed

#: Optimiser steps before the script's own calls are compared.
MIN_STEPS = 4


class Schedule:
    """A scheduler that can be moved to any position. `position` counts optimiser steps of the swarm.

    One optimiser step moves the scheduler on by `stride` (`training.trainer.script_arguments`).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        warn: Warn,
        *,
        stride: int = 1,
    ) -> None:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TrainerFailed(
                "ReduceLROnPlateau follows this node's own loss, and a schedule has to be the same on all nodes",
                "take a schedule that is a function of the step, as CosineAnnealingLR",
                fatal=True,
            )
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._warn = warn
        self._stride = stride
        self._over = False
        self._initial = copy.deepcopy(scheduler.state_dict())
        self._initial_groups = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        self._origin = _count(scheduler)
        self._sought = self._stepped = self._steps = 0
        self._found = ""

    @property
    def position(self) -> int:
        return (_count(self._scheduler) - self._origin) // self._stride

    def advance(self) -> None:
        """Move the scheduler on by one."""
        if self._over:
            return
        try:
            self._scheduler.step()
        except ValueError as error:  # OneCycleLR raises this at its end.
            self._over = True
            self._warn("schedule_over", f"the learning rate's schedule has ended and stays as it is: {error}")

    def differs(self, steps: int) -> str:
        """At the end of a turn of `steps` optimiser steps: how often the script itself has stepped the schedule, if
        that is less than half or more than twice as often as its optimiser. A script may step it after `swarm.step`, so
        that the first turn lacks one. The counts are those of when it was found, so that it is found once."""
        self._steps += steps
        self._stepped += self.position - self._sought
        if self._over or self._steps < MIN_STEPS or self._steps <= 2 * self._stepped <= 4 * self._steps:
            self._found = ""
        elif not self._found:
            self._found = (
                f"the script has stepped the schedule {type(self._scheduler).__name__} {self._stepped} times in "
                f"{self._steps} optimiser steps, but the swarm moves it on once in each"
            )
        return self._found

    def seek(self, position: int) -> None:
        """Move to where a node is that took part from the beginning."""
        self._sought = position
        if position == self.position or self._over:
            return
        if position < self.position:
            self._reset()
        with warnings.catch_warnings():
            # It warns of steps without the optimiser's own; other nodes took those.
            warnings.simplefilter("ignore", UserWarning)
            while self.position < position and not self._over:
                self.advance()

    def state(self) -> dict[str, Any]:
        return self._scheduler.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        self._scheduler.load_state_dict(state)

    def _reset(self) -> None:
        self._scheduler.load_state_dict(copy.deepcopy(self._initial))
        # Groups that were added since, as those of unfrozen layers, have no beginning to go back to.
        for group, initial in zip(self._optimizer.param_groups, self._initial_groups, strict=False):
            set_in_place(group, copy.deepcopy(initial))


def set_in_place(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Give a parameter group these values. A captured or compiled optimiser goes on reading the tensors that it was
    captured with: such a rate is filled, and not replaced. A rate that is a number stays one."""
    for name, value in values.items():
        known = group.get(name)
        if isinstance(known, Tensor):
            known.fill_(float(value))
        else:
            group[name] = float(value) if isinstance(known, float) and isinstance(value, Tensor) else value


def _count(scheduler: Any) -> int:
    """How often it was stepped; `ChainedScheduler` keeps the count in those that it chains. Raises `TrainerFailed`."""
    count = getattr(scheduler, "last_epoch", None)
    if count is None and (inner := getattr(scheduler, "_schedulers", ())):
        count = inner[0].last_epoch
    if count is None:
        raise TrainerFailed(
            f"the schedule {type(scheduler).__name__} does not say how often it was stepped (last_epoch)",
            "leave it out of attach, and set the learning rate from swarm.step_number",
            fatal=True,
        )
    return int(count)
