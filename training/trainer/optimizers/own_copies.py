"""Finds an optimiser that steps on copies of the weights of its own, and so undoes what is loaded into the model.

Such copies ("master weights") go on from where they were; the next step writes them over the values of the swarm, and
this node's delta takes back the work of the others. Nothing else shows it: losses fall, and deltas are finite.

A load moves the weights from w0 to w1, and the first optimiser step after it to w2. The step of a copy is small beside
a load, so w2 is near w0. An ordinary step is a function of the gradient and of the steps before it. So what is parallel
to this node's last delta and to the gradient is left out of both w0 - w1 and w2 - w1, and the rest is compared: with
copies the difference is a small part of the rest of w0 - w1, else nearly all of it. Without leaving these out, any
optimiser would be suspected where `local_steps` is 1: in each turn the others undo what this node then does again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from p2pnode.training.trainer.model.local_part import local_of

#: Values of this many parameters are looked at, and of each so many at most.
PARAMETERS, VALUES = 4, 256

#: A turn is evidence if so small a part of the way back is missing. Copies left at most 0.3 with 5 local steps or more;
#: of 15 other kinds of optimisers, eight seeds each, none came below it in three turns in a row.
MISSING = 0.4

#: So many turns in a row are found out. Those that cannot tell do not count.
TURNS = 3

#: After so many turns that show none, every so many turns are looked at.
CALM_TURNS, SELDOM = 32, 16

#: A turn can tell if the rest of the load is spread over so many values, and is no rounding of the weights.
SPREAD, ROUNDING = 16.0, 1e-6

Rows = npt.NDArray[np.float64]


class OwnCopies:
    """Of the parameters of one model, `(name, parameter)`, each in one of the optimisers or in none that is known."""

    def __init__(self, named: Sequence[tuple[str, Tensor]], optimizers: Sequence[Any]) -> None:
        holders = {
            id(parameter): index
            for index, optimizer in enumerate(optimizers)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        units: dict[tuple[int, torch.dtype], list[tuple[str, Tensor]]] = {}
        for name, parameter in named:
            units.setdefault((holders.get(id(parameter), -1), parameter.dtype), []).append((name, parameter))
        # What some optimisers do with values of one type is alike; several kinds mixed would hide one of them.
        self._units = [_Unit(members) for members in units.values()]

        self._loads = self._calm_turns = 0
        self._has_stepped = True

    @property
    def _watches(self) -> tuple[bool, bool]:
        """Whether the present load is looked at, and the step after it."""
        if self._calm_turns < CALM_TURNS:
            return True, True
        return self._loads % SELDOM < 2, self._loads % SELDOM == 1

    def before_load(self) -> None:
        """The model is about to be loaded."""
        if self._has_stepped:  # Else it is the same turn, whose weights are loaded again.
            self._loads += 1
        self._has_stepped = False
        if self._watches[0]:
            for unit in self._units:
                unit.before_load()

    def after_load(self) -> None:
        if self._watches[0]:
            for unit in self._units:
                unit.after_load()

    def after_step(self, *, is_alone: bool) -> None:
        """The optimisers have taken the first step after a load. A node that is alone shows nothing."""
        self._has_stepped = True
        for unit in self._units:
            unit.after_step(can_tell=self._watches[1] and not is_alone)

    def found(self) -> str | None:
        """Once a turn: the name of a parameter of which an optimiser has its own copy."""
        missing = [part for unit in self._units if (part := unit.missing()) is not None]
        if missing:
            self._calm_turns = 0 if min(missing) < MISSING else self._calm_turns + 1
        return next((unit.name for unit in self._units if unit.turns >= TURNS), None)


class _Unit:
    """Parameters that are stepped alike."""

    def __init__(self, members: Sequence[tuple[str, Tensor]]) -> None:
        members = [named for named in members if named[1].numel() >= VALUES] or members
        count = min(PARAMETERS, len(members))
        chosen = [members[index * len(members) // count] for index in range(count)]
        self.name = chosen[0][0]
        #: So many turns in a row were evidence.
        self.turns = 0
        self._parameters = [parameter for _, parameter in chosen]
        self._view()
        size = sum(view.numel() for view in self._views)
        self._rows = torch.zeros(5, size, dtype=torch.float32, device=self._parameters[0].device)
        self._loads = 0
        self._awaits_step = self._can_tell = False

    def _view(self) -> None:
        held = list(map(local_of, self._parameters))
        self._addresses = list(map(Tensor.data_ptr, held))
        self._views = [_part(values, values.detach()) for values in held]

    def before_load(self) -> None:
        if [local_of(parameter).data_ptr() for parameter in self._parameters] != self._addresses:
            self._view()  # the values are in other memory now
            self._loads = 0
        self._can_tell = False
        if not self._awaits_step:  # Else nothing was trained since a load: w0 is before that one.
            self._rows[_BEGUN].copy_(self._rows[_LOADED])
            torch.cat(self._views, out=self._rows[_BEFORE])
            self._loads += 1

    def after_load(self) -> None:
        torch.cat(self._views, out=self._rows[_LOADED])
        self._awaits_step = True

    def after_step(self, *, can_tell: bool) -> None:
        self._can_tell = can_tell and self._awaits_step and self._loads > 1
        self._awaits_step = False
        if not self._can_tell:
            return
        torch.cat(self._views, out=self._rows[_STEPPED])
        gradients = [parameter.grad for parameter in self._parameters]
        torch.cat(
            [
                torch.zeros_like(view)
                if gradient is None or gradient.is_sparse
                else _part(local_of(parameter), local_of(gradient))
                for parameter, view, gradient in zip(self._parameters, self._views, gradients, strict=True)
            ],
            out=self._rows[_GRADIENT],
        )

    def missing(self) -> float | None:
        """What the turn shows; None: nothing."""
        if not self._can_tell:
            return None
        self._can_tell = False
        missing = missing_part(self._rows.cpu().numpy().astype(np.float64))
        if missing is not None:
            self.turns = self.turns + 1 if missing < MISSING else 0
        return missing


#: The weights where the turn before began, w0, w1, w2, and the gradient of that step.
_BEGUN, _BEFORE, _LOADED, _STEPPED, _GRADIENT = range(5)


def missing_part(rows: Rows) -> float | None:
    """How much of the way back from a load the step has not gone, as a part of it; None: nobody can tell.

    `rows` is `float64[5, values]`: the weights where the turn before began, before the load, after it, and after the
    step that followed, and the gradient of that step.
    """
    begun, before, loaded, stepped, gradient = rows
    if not np.isfinite(rows).all():
        return None
    known = np.stack([_normed(before - begun), _normed(gradient)], axis=1)
    moved = np.stack([before - loaded, before - stepped], axis=1)
    moved -= known @ np.linalg.lstsq(known, moved, rcond=None)[0]
    (size, rest), load = np.linalg.norm(moved, axis=0), moved[:, 0]
    if size <= ROUNDING * np.linalg.norm(loaded):
        return None
    # Only what would be evidence has to be looked at closely.
    if rest < MISSING * size and size**4 < SPREAD * float((load**4).sum()):
        return None
    return float(rest / size)


def _normed(vector: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The vector with length 1, or as it is if it is zero."""
    found: npt.NDArray[np.float64] = vector / (np.linalg.norm(vector) or 1.0)
    return found


def _part(parameter: Tensor, values: Tensor) -> Tensor:
    """Some values of what has the parameter's shape, in one dimension; of the parameter itself a view."""
    if parameter.is_contiguous():
        begin = max(0, (parameter.numel() - VALUES) // 2)
        return values.reshape(-1)[begin : begin + VALUES]
    while values.dim() > 1:
        smallest = min(range(values.dim()), key=lambda dimension: values.shape[dimension])
        values = values.select(smallest, 0)
    return values[:VALUES]
