"""Counts optimiser steps where they happen, so that a call of `swarm.step` too many moves nothing on.

A hook of each optimiser counts its steps, or those of the one inside it, if it takes none itself. A call of
`swarm.step` counts the steps since the call before; one without a step, during evaluation or after a scaler has
skipped, counts none. Of several optimisers that have stepped the fewest steps count: a critic may step five times for
each step of its generator.

Some steps run no hook: those of optimisers that are none of PyTorch's, and of captured graphs. Then calls are counted.
That it is so is found by the weights: they change, and no hook has run.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from p2pnode.training.trainer.connection import ScriptWarnings

#: After so many calls without a step the weights are compared, and again after twice as many.
FIRST_LOOK = 8
#: Steps after the end of the run from which on it is no accident.
LATE_STEPS = 2
#: Values that are compared of each of the largest tensors.
LOOKED_AT_VALUES, LOOKED_AT_TENSORS = 64, 8


class StepCount:
    """Of the optimisers of one script; `tensors` are what is trained, and `findings` takes what is found."""

    def __init__(self, optimizers: Sequence[Any], tensors: Sequence[Tensor], findings: ScriptWarnings) -> None:
        self._findings = findings
        self._names = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
        self._taken = [0] * len(optimizers)  # since the last call
        self._inside = [0] * len(optimizers)
        self._by_calls = False
        self._tensors = sorted(tensors, key=Tensor.numel)[-LOOKED_AT_TENSORS:]
        self._idle_calls = 0
        self._seen: Tensor | None = None
        # Of the turn under way.
        self._calls = self._counted = 0
        self._late = 0
        self._hooks = []
        for index, optimizer in enumerate(optimizers):
            if hasattr(optimizer, "register_step_post_hook"):
                self._hooks.append(optimizer.register_step_post_hook(self._hook(index)))
            else:
                self._by_calls = True
            # SAM calls `step` of the optimiser inside it, and none of its own.
            for inner in getattr(optimizer, "__dict__", {}).values():
                if hasattr(inner, "register_step_post_hook") and not isinstance(inner, type):
                    self._hooks.append(inner.register_step_post_hook(self._hook(index, is_inside=True)))

    def _hook(self, index: int, *, is_inside: bool = False) -> Any:
        def count(*_: Any) -> None:
            (self._inside if is_inside else self._taken)[index] += 1

        return count

    def forget(self) -> None:
        """The script has other optimisers from now on."""
        for hook in self._hooks:
            hook.remove()

    def loaded(self) -> None:
        """The weights have changed, and not by a step."""
        self._idle_calls = 0

    def call(self) -> int:
        """How many optimiser steps this call of `swarm.step` stands for."""
        self._calls += 1
        if self._by_calls:
            return 1
        taken = [own or inside for own, inside in zip(self._taken, self._inside, strict=True)]
        self._taken, self._inside = [0] * len(taken), [0] * len(taken)
        if any(taken):
            self._idle_calls = 0
            steps = min(filter(None, taken))
            self._counted += steps
            return steps
        self._idle_calls += 1
        if self._idle_calls >= FIRST_LOOK and self._idle_calls & (self._idle_calls - 1) == 0:
            self._by_calls = self._has_changed()
        elif self._idle_calls == 1:
            self._seen = self._look()
        if self._idle_calls == FIRST_LOOK and not self._by_calls and not self._counted:
            # Its turn would never end.
            what = f"swarm.step() was called {FIRST_LOOK} times, and {self._names}, given to attach, took no step"
            do = "call optimizer.step() before it; nothing is trained or exchanged until then"
            self._findings("swarm_steps_differ", what, do)
        return int(self._by_calls)

    def after_end(self) -> None:
        """A call of `swarm.step` when the run is over. The second one after a step warns: what is trained then is
        in no model but the script's. One more step happens where a library ends its loop only after it."""
        if self._by_calls or not self.call():
            return
        self._late += 1
        if self._late == LATE_STEPS:
            warnings.warn(
                "the script goes on training after the end of the run (swarm.done): its model is no longer that of the "
                "swarm. End the loop when swarm.done is true; swarm.step() sets it.",
                RuntimeWarning,
                stacklevel=3,
            )

    def end_turn(self, *, may_skip: bool) -> None:
        """Compare calls and steps of the turn. `may_skip`: a scaler may have skipped up to half of the steps."""
        calls, self._calls = self._calls, 0
        steps, self._counted = self._counted, 0
        what = unseen = ""
        if self._by_calls:
            unseen = f"the weights change, and {self._names}, given to attach, took no step: swarm.step() is counted"
        elif calls > (2 * steps if may_skip else steps):
            what = f"swarm.step() was called {calls} times for {steps} optimiser steps; calls without a step count none"
        do = "call it once after each optimiser step, and not during evaluation"
        self._findings("swarm_steps_differ", what, do)
        do = "give attach the optimiser that trains; with captured steps nothing needs to be done"
        self._findings("optimizer_steps_unseen", unseen if self._hooks else "", do)

    def _has_changed(self) -> bool:
        seen = self._seen
        return seen is not None and not torch.equal(self._look(), seen)

    @torch.no_grad()
    def _look(self) -> Tensor:
        parts = [tensor.reshape(-1)[:: max(1, tensor.numel() // LOOKED_AT_VALUES)] for tensor in self._tensors]
        return torch.cat([part.detach().to("cpu", torch.float32, copy=True) for part in parts])


class MetricMeans:
    """Sums per name since the turn began."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, name: str, value: float | Tensor) -> None:
        """Add one value; a `loss` of NaN before any other loss means that none was given."""
        if isinstance(value, Tensor):
            term = value.detach().float().reshape(())
        elif name == "loss" and math.isnan(value) and name not in self._sums:
            return
        else:
            term = torch.tensor(float(value))
        self._sums[name] = self._sums[name] + term if name in self._sums else term
        self._counts[name] = self._counts.get(name, 0) + 1

    def __contains__(self, name: str) -> bool:
        return name in self._sums

    def means(self) -> dict[str, float]:
        """The mean per name; waits for the device."""
        return {name: float(total) / self._counts[name] for name, total in self._sums.items()}
