"""Optimisers that step on copies of the weights are found, and no others are suspected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adadelta, Adafactor, AdamW, Muon, Optimizer, RMSprop, Rprop

from p2pnode.training.trainer.optimizers.own_copies import CALM_TURNS, MISSING, SELDOM, OwnCopies, missing_part
from p2pnode.training.trainer_link.interface import TrainerFailed
from tests.harness.runner.long_run import more
from tests.harness.trainers.local_nodes import LocalSwarm
from tests.harness.trainers.optimizers import (
    COPYING,
    DualAveraging,
    FusedMasters,
    Lookahead,
    Prodigy,
    SGDScheduleFree,
)

Make = Callable[[nn.Module], Sequence[Any]]
#: Optimiser steps before the values of a turn enter.
LATE = [0, 2]


def adamw(parameters: list[Tensor]) -> Optimizer:
    return AdamW(parameters, lr=0.005)


def swarm(make: Make, *, count: int = 2, on_load: Any = None, **settings: Any) -> LocalSwarm:
    found = LocalSwarm(0, count, **{"differs": True, "local_steps": 5, **settings})
    for _ in range(count):
        found.add(make, on_load)
    return found


KINDS = [kind for kinds in COPYING.values() for kind in kinds]


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("differs", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_found_in_a_few_turns(kind: Any, differs: bool, late: int) -> None:
    """In the shapes of Apex, an offloaded optimiser, Megatron and DeepSpeed; one of the parameters is named."""
    found = swarm(lambda model: [kind(model.parameters(), adamw)], differs=differs, late=late)

    with pytest.raises(TrainerFailed, match=rf"{kind.__name__} steps on weights of its own.*\.weight") as failure:
        found.run(8)

    assert failure.value.fatal
    assert "on_load" in failure.value.hint


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("kind", KINDS)
def test_copies_that_on_load_brings_up_to_date_are_like_no_copies(kind: Any, late: int) -> None:
    """The swarm has the same values to the bit as with the same optimiser on the weights themselves."""
    copying = swarm(
        lambda model: [kind(model.parameters(), adamw)],
        on_load=lambda optimizers: optimizers[0].copy_in,
        late=late,
    )
    plain = swarm(lambda model: [adamw(list(model.parameters()))], late=late)

    copying.run(8)
    plain.run(8)

    assert np.array_equal(copying.value, plain.value)


def test_an_on_load_that_leaves_copies_out_is_found() -> None:
    """And told what is wrong with it."""
    found = swarm(lambda model: [FusedMasters(model.parameters(), adamw)], on_load=lambda _: lambda: None)

    with pytest.raises(TrainerFailed) as failure:
        found.run(8)

    assert failure.value.hint.startswith("on_load has to copy the loaded weights")


def test_one_of_two_optimisers_with_copies_is_found() -> None:
    """The other one has most of the values."""

    def make(model: nn.Module) -> list[Any]:
        first, last = model[0].parameters(), model[2].parameters()  # type: ignore[index]
        return [SGD(first, lr=0.1), FusedMasters(last, adamw)]

    with pytest.raises(TrainerFailed, match=r"2\.weight"):
        swarm(make).run(8)


def test_a_node_alone_shows_nothing() -> None:
    """Its momentum moves the weights, and copies take that back, but nobody else is harmed."""
    swarm(lambda model: [FusedMasters(model.parameters(), adamw)], count=1).run(12)


OTHERS: dict[str, Make] = {
    "sgd": lambda model: [SGD(model.parameters(), lr=0.1)],
    "sgd at the edge": lambda model: [SGD(model.parameters(), lr=1.0)],
    "momentum": lambda model: [SGD(model.parameters(), lr=0.02, momentum=0.99, nesterov=True)],
    "adamw": lambda model: [AdamW(model.parameters(), lr=0.005)],
    "adamw with a large rate": lambda model: [AdamW(model.parameters(), lr=0.2)],
    "muon": lambda model: [
        Muon([one for one in model.parameters() if one.dim() == 2], lr=0.05),
        AdamW([one for one in model.parameters() if one.dim() != 2], lr=0.01),
    ],
    "rmsprop": lambda model: [RMSprop(model.parameters(), lr=0.01)],
    "rprop": lambda model: [Rprop(model.parameters(), lr=0.01)],
    "adadelta": lambda model: [Adadelta(model.parameters(), lr=1.0)],
    "adafactor": lambda model: [Adafactor(model.parameters(), lr=0.02)],
    "lbfgs": lambda model: [LBFGS(model.parameters(), lr=0.5, max_iter=4)],
    "lookahead": lambda model: [Lookahead(AdamW(model.parameters(), lr=0.005))],
    "schedule-free": lambda model: [SGDScheduleFree(model.parameters(), lr=0.5)],
    "dual averaging": lambda model: [DualAveraging(model.parameters(), lr=0.02)],
    "prodigy": lambda model: [Prodigy(model.parameters())],
}


@pytest.mark.parametrize(("differs", "batch"), [(True, 32), (False, 0)])
@pytest.mark.parametrize(("local_steps", "late"), [(5, 2), *more((1, 0))])
@pytest.mark.parametrize("name", OTHERS)
def test_other_optimisers_are_not_suspected(name: str, local_steps: int, late: int, differs: bool, batch: int) -> None:
    """Also where each turn is one step on all of the data, and the nodes undo each other's work at the optimum."""
    swarm(OTHERS[name], differs=differs, local_steps=local_steps, batch=batch, late=late).run(10)


def rows(**given: float) -> np.ndarray:
    """Weights of 400 values, each row in a direction of its own but for what is given."""
    generator = np.random.default_rng(3)
    own, others, gradient, step = generator.normal(size=(4, 400))
    begun = generator.normal(size=400)
    before = begun + own
    loaded = begun + given.get("own", 0.5) * own + given.get("others", 0.5) * others
    stepped = loaded + given.get("back", 0.0) * (before - loaded) + given.get("again", 0.0) * own
    stepped += given.get("step", 0.1) * step - given.get("rate", 0.0) * gradient
    return np.stack((begun, before, loaded, stepped, gradient))


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({}, 1.0),
        ({"back": 1.0}, 0.2),
        ({"back": 1.0, "rate": 3.0}, 0.2),
        ({"back": 1.0, "again": 1.0}, 0.2),
        ({"back": 0.5}, 0.5),
        ({"again": 1.0, "rate": 3.0}, 1.0),
    ],
    ids=["a step", "back", "back and on along the gradient", "back and on as before", "half", "on as before"],
)
def test_what_is_parallel_to_the_gradient_and_to_the_last_delta_does_not_count(
    given: dict[str, float], missing: float
) -> None:
    """Neither for a copy, whose step may be long, nor for an ordinary step, which may go back along its last delta."""
    found = missing_part(rows(**given))

    assert found is not None
    assert abs(found - missing) < 0.1
    assert (found < MISSING) is (missing < MISSING)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_size_of_the_gradient_does_not_matter(scale: float) -> None:
    """That of a scaled loss, or of one that is nearly learnt."""
    given = rows(back=1.0, rate=3.0)
    given[4] *= scale

    assert missing_part(given) == pytest.approx(missing_part(rows(back=1.0, rate=3.0)))


def test_some_turns_cannot_tell() -> None:
    """The load was rounding, of few values, parallel to this node's own work, or something is not finite."""
    few = rows(back=1.0)
    few[:, 8:] = 0.0
    infinite = rows(back=1.0)
    infinite[3, 7] = np.inf

    assert missing_part(rows(own=1.0, others=0.0, back=1.0)) is None
    assert missing_part(rows(own=0.2, others=0.0, back=1.0, step=0.0)) is None
    assert missing_part(few) is None
    assert missing_part(infinite) is None


class Watched:
    """Copies that go their way, whatever is loaded; `copies` are those of a module of some type and memory format."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.copies = [parameter.detach().clone() for parameter in model.parameters()]
        self.finder = OwnCopies(list(model.named_parameters()), [SGD(model.parameters(), lr=1.0)])
        self.generator = torch.Generator().manual_seed(2)

    def noise(self, like: Tensor, size: float) -> Tensor:
        return (size * torch.randn(like.shape, generator=self.generator)).to(like)

    @torch.no_grad()
    def turn(self, *, loads: int = 1, is_undone: bool = True) -> str | None:
        for _ in range(loads):
            self.finder.before_load()
            for parameter in self.model.parameters():
                parameter.add_(self.noise(parameter, 0.1))
            self.finder.after_load()
        for parameter, copy in zip(self.model.parameters(), self.copies, strict=True):
            copy.add_(self.noise(copy, 0.01))
            parameter.copy_(copy if is_undone else parameter + self.noise(copy, 0.01))
        self.finder.after_step(is_alone=False)
        return self.finder.found()


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(64, 64),
        nn.Linear(64, 64, dtype=torch.bfloat16),
        nn.Conv2d(8, 64, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 4)),
    ],
    ids=["float32", "bfloat16", "channels last", "small"],
)
@pytest.mark.parametrize("loads", [1, 2])
def test_copies_of_all_types_are_found_in_the_fourth_turn(model: nn.Module, loads: int) -> None:
    """The first has no turn before it. Weights may be loaded twice, as for an evaluation between two turns."""
    watched = Watched(model)

    assert [watched.turn(loads=loads) is not None for _ in range(5)] == [False, False, False, True, True]


def test_memory_that_is_replaced_is_followed() -> None:
    """`model.to` of the same type leaves the parameters, and gives them other memory."""
    watched = Watched(nn.Linear(64, 64))
    watched.turn()
    for parameter in watched.model.parameters():
        parameter.data = parameter.detach().clone()

    assert [watched.turn() is not None for _ in range(5)] == [False, False, False, True, True]


def test_one_turn_that_shows_none_begins_the_count_anew() -> None:
    """Three in a row are needed."""
    watched = Watched(nn.Linear(64, 64))

    assert not any(watched.turn(is_undone=index % 3 != 2) for index in range(24))


def test_after_many_calm_turns_few_are_looked_at_and_copies_are_still_found() -> None:
    """The script may have begun to use them."""
    watched = Watched(nn.Linear(64, 64))
    assert not any(watched.turn(is_undone=False) for _ in range(CALM_TURNS + 3 * SELDOM))
    for parameter, copy in zip(watched.model.parameters(), watched.copies, strict=True):
        copy.copy_(parameter.detach())

    found = [watched.turn() is not None for _ in range(2 * SELDOM)]

    assert found.index(True) <= SELDOM + 3
