"""Moves the positions that optimisers keep along with the weights that are loaded.

Most state of an optimiser is made of gradients. Some is a place among the weights: the slow weights of Lookahead, z of
schedule-free, x0 of MADGRAD, averages of the weights. It says "so far from here", and means this node's own weights. If
these are replaced and it stays, the next steps go back to where it is, and this node takes back the work of the others.
So it is kept relative to the weights while they are loaded, and while the state is saved: what is restored then goes
with the weights of the swarm, wherever they are by that time.

p0 of Prodigy stays: it is where the training began. Distances from it bound the estimate of the rate, whoever has gone
them. With p0 moved along, the estimate grew to 10^16 where it has to be 0.01.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from p2pnode.training.trainer.optimizers.schedule_free import is_schedule_free

#: State with these names is where the training began.
_STAYS = frozenset({"p0"})

#: Unknown state is a position if it is so near to the parameters when it is first seen, after one step of training:
#: its mean square distance from them, as a part of their mean square.
NEAR = 0.1


class OptimizerPositions:
    """Of a script's optimisers and those inside them (`with_inner`)."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = list(optimizers)
        #: Per optimiser the names of its state, and whether they are positions.
        self._known: list[dict[str, bool]] = [{} for _ in optimizers]

    def look(self) -> None:
        """Find out what new state is. To be called when an optimiser may have made it."""
        for optimizer, known in zip(self._optimizers, self._known, strict=True):
            for name in _names(optimizer) - known.keys():
                if (is_position := _judge(optimizer, name)) is not None:
                    known[name] = is_position

    @contextmanager
    def relative(self, *, ends: bool = False) -> Iterator[None]:
        """Inside the block positions are relative to the weights. With `ends` z of schedule-free is the weights
        afterwards."""
        self.look()
        pairs = self._pairs()
        with torch.no_grad():
            for position, parameter in pairs:
                position.sub_(parameter.to(position.device))
        try:
            yield
        finally:
            if ends:
                self._forget_offsets()
            with torch.no_grad():
                for position, parameter in pairs:
                    position.add_(parameter.to(position.device))

    def state(self) -> list[list[str]]:
        """What is to be saved with a state that was taken inside `relative`."""
        return [sorted(name for name, is_position in known.items() if is_position) for known in self._known]

    @torch.no_grad()
    def restored(self, names: list[list[str]]) -> None:
        """The optimisers have loaded a state that was saved with these names."""
        for optimizer, known, found in zip(self._optimizers, self._known, names, strict=True):
            known.update(dict.fromkeys(_names(optimizer), False), **dict.fromkeys(found, True))
        for position, parameter in self._pairs():
            position.add_(parameter.to(position.device))

    @torch.no_grad()
    def _forget_offsets(self) -> None:
        for optimizer in self._optimizers:
            if is_schedule_free(optimizer):
                for position, _ in _tensors(optimizer, "z"):
                    position.zero_()

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Positions with their parameters, each once: a wrapper may show the state of what it wraps."""
        pairs = {
            id(pair[0]): pair
            for optimizer, known in zip(self._optimizers, self._known, strict=True)
            for name, is_position in known.items()
            if is_position
            for pair in _tensors(optimizer, name)
        }
        return list(pairs.values())


def with_inner(optimizers: Sequence[Any]) -> list[Any]:
    """The optimisers, and those that they wrap."""
    found: list[Any] = []
    waiting = list(optimizers)
    while waiting:
        one = waiting.pop(0)
        if _is_optimizer(one) and all(one is not other for other in found):
            found.append(one)
            for value in vars(one).values():
                waiting += value if isinstance(value, list | tuple) else [value]
    return found


def _is_optimizer(value: object) -> bool:
    return not isinstance(value, type) and hasattr(value, "param_groups") and hasattr(value, "step")


def _states(optimizer: Any, group: dict[str, Any]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """The parameters of the group that have state, with it."""
    states: Any = getattr(optimizer, "state", {})
    for parameter in group["params"] if isinstance(states, dict) else ():
        state = states.get(parameter)
        if isinstance(state, dict) and state:
            yield parameter, state


def _names(optimizer: Any) -> set[str]:
    """The names of the tensors in the state of one parameter of each group: the others have the same."""
    states = [state for group in optimizer.param_groups for _, state in islice(_states(optimizer, group), 1)]
    items = [item for state in states for item in state.items()]
    return {name for name, value in items if isinstance(name, str) and isinstance(value, Tensor)}


def _tensors(optimizer: Any, name: str) -> list[tuple[Tensor, Tensor]]:
    """The state of this name that has the shape of its parameter, with the parameter."""
    states = [pair for group in optimizer.param_groups for pair in _states(optimizer, group)]
    pairs = [(state.get(name), parameter) for parameter, state in states]
    return [
        (value, parameter)
        for value, parameter in pairs
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape
    ]


@torch.no_grad()
def _judge(optimizer: Any, name: str) -> bool | None:
    """Whether this state is a position; None: it cannot be told yet."""
    if name in _STAYS:
        return False
    if is_schedule_free(optimizer) and name == "z":
        return True
    pairs = _tensors(optimizer, name)
    distance = size = 0.0
    for value, parameter in pairs:
        here = parameter.float()
        distance += float((value.to(here.device, torch.float32) - here).square().sum())
        size += float(here.square().sum())
    if pairs and not distance + size:
        return None
    return bool(pairs) and distance <= NEAR * size
