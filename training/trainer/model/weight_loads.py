"""What has to go along when values are loaded into the model, for all ways in which that happens.

Positions in optimisers move with the weights (`optimizer_positions`). Schedule-free optimisers are in their mode for
training (`schedule_free`). The script's `on_load` brings copies of the weights up to date, and copies that nobody
brings up to date are found (`own_copies`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.optim import LBFGS

from p2pnode.training.trainer.model.vector import ModelVector
from p2pnode.training.trainer.optimizers.optimizer_positions import OptimizerPositions, with_inner
from p2pnode.training.trainer.optimizers.own_copies import TURNS, OwnCopies
from p2pnode.training.trainer.optimizers.schedule_free import ScheduleFree
from p2pnode.training.trainer_link.interface import TrainerFailed

OnLoad = Callable[[], object]


class WeightLoads:
    """Into one model. `on_load` is called after each load, and copies the weights to where the optimisers have them.

    Raises `TrainerFailed` for an optimiser that cannot be followed.
    """

    def __init__(self, model_vector: ModelVector, optimizers: Sequence[Any], on_load: OnLoad | None = None) -> None:
        all_optimizers = with_inner(optimizers)
        self._model_vector = model_vector
        self._names = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
        self._on_load = on_load
        self._modes = ScheduleFree(all_optimizers)
        self._positions = OptimizerPositions(all_optimizers)
        entries = zip(model_vector.named_tensors(), model_vector.layout.entries, strict=True)
        self._copies = OwnCopies([named for named, entry in entries if entry.kind == "parameter"], optimizers)
        self._has_stepped = False
        self._lbfgs = [optimizer for optimizer in all_optimizers if isinstance(optimizer, LBFGS)]

    @contextmanager
    def load(self, *, ends: bool = False) -> Iterator[None]:
        """Around a load, on all ranks together. `ends`: nothing is trained after it."""
        with self._moving(ends=ends):
            self._copies.before_load()
            yield
            self._copies.after_load()
        self._has_stepped = False
        # It estimates curvature from the change of the gradient between its own positions: across a load that change is
        # another one, and its next step may be 10^6 times too long.
        for optimizer in self._lbfgs:
            optimizer.state.clear()

    def exchanging(self) -> AbstractContextManager[None]:
        """Around reading what the swarm is to have of the model."""
        return self._modes.training()

    def pull(self) -> AbstractContextManager[None]:
        """Around a small change of the weights after an optimiser step."""
        return self._moving()

    @contextmanager
    def _moving(self, *, ends: bool = False) -> Iterator[None]:
        with self._modes.training(), self._positions.relative(ends=ends):
            yield
            if self._on_load is not None:
                self._on_load()

    @contextmanager
    def shared(self, is_current: Callable[[], bool]) -> Iterator[None]:
        """Inside the block the model holds the swarm's weights; what the optimisers have stays as it is. Afterwards it
        holds what it did before, unless `is_current` says that newer values were loaded inside of it."""
        before = self._modes.begin_evaluation()
        own = self._model_vector.keep()
        self._model_vector.load_shared()
        try:
            yield
        finally:
            self._modes.end_evaluation(before, lambda: self._model_vector.put_back(own) if is_current() else None)

    def seek(self, position: int) -> None:
        """A turn begins at `position` optimiser steps of the swarm."""
        self._modes.seek(position)

    def stepped(self, steps: int, workers: float) -> None:
        """The optimisers have taken steps; `workers` nodes train."""
        self._modes.count(steps)
        if not self._has_stepped:
            self._has_stepped = True
            self._positions.look()
            self._copies.after_step(is_alone=workers <= 1)

    def check(self) -> None:
        """Once a turn. Raises `TrainerFailed` for an optimiser that undoes what is loaded."""
        if (name := self._copies.found()) is None:
            return
        do = "give p2pnode.attach() an on_load that copies the loaded weights to where the optimiser has them"
        if self._on_load is not None:
            do = "on_load has to copy the loaded weights to wherever the optimiser has them"
        raise TrainerFailed(
            f"{self._names} steps on weights of its own, not on those that are loaded: in {TURNS} turns in a row its "
            f"first step put {name} and others back to where they were before, which undoes what the other nodes do",
            f"{do} (docs/own-model.md); one that computes the weights from sums of gradients, as FTRL, cannot be used",
            fatal=True,
        )

    # --- files --------------------------------------------------------------------------------------------------

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around taking and copying the state of the optimisers."""
        with self._modes.training(), self._positions.relative():
            yield

    def state(self) -> dict[str, Any]:
        """What is to be saved with it, inside `saving`."""
        return {"positions": self._positions.state(), "counted": self._modes.counted}

    @contextmanager
    def restoring(self, saved: dict[str, Any]) -> Iterator[None]:
        """Around loading the state of the optimisers that was saved with `saved`."""
        with self._modes.keeping_mode():
            yield
            self._positions.restored(saved["positions"])
            self._modes.counted = int(saved["counted"])
