"""Positions in the state of optimisers go along with the weights that are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, AdamW

from p2pnode.training.trainer.optimizers.optimizer_positions import OptimizerPositions, with_inner
from tests.harness.trainers.local_nodes import LocalNode, LocalSwarm
from tests.harness.trainers.optimizers import DualAveraging, Lookahead, Prodigy, SGDScheduleFree

Make = Callable[[nn.Module], Sequence[Any]]


def trained(make: Make, turns: int = 3, late: int = 0) -> LocalSwarm:
    """Two nodes with classes of their own, after some turns."""
    swarm = LocalSwarm(0, 2, differs=True, local_steps=7, late=late)
    for _ in range(2):
        swarm.add(make)
    swarm.run(turns)
    return swarm


def offsets(node: LocalNode, name: str) -> list[Tensor]:
    """How far each position is from its parameter."""
    return [
        state[name] - parameter.detach()
        for optimizer in node.optimizers
        for parameter, state in optimizer.state.items()
        if name in state
    ]


KINDS: dict[str, tuple[Make, str]] = {
    "lookahead": (lambda model: [Lookahead(AdamW(model.parameters(), lr=0.005))], "slow_params"),
    "schedule-free": (lambda model: [SGDScheduleFree(model.parameters(), lr=0.5)], "z"),
    "dual averaging": (lambda model: [DualAveraging(model.parameters(), lr=0.02)], "x0"),
    "average": (lambda model: [ASGD(model.parameters(), lr=0.05, t0=0)], "ax"),
}


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_position_is_as_far_from_the_weights_after_a_load_as_before(kind: str, late: int) -> None:
    """Whatever is loaded, or enters: the values of the others, or of another swarm."""
    make, name = KINDS[kind]
    node = trained(make, late=late).nodes[0]
    before = offsets(node, name)

    values = np.random.default_rng(1).normal(size=node.delta.size).astype(np.float32)
    with node.loads.load():
        if late:
            node.vector.enter(torch.from_numpy(values))
        else:
            node.vector.load(values)

    assert before
    assert any(bool(one.abs().max() > 1e-3) for one in before)
    for one, other in zip(before, offsets(node, name), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_position_that_is_saved_is_as_far_from_the_weights_that_are_there_when_it_is_restored(kind: str) -> None:
    """A node that is started again has other weights than when the state was saved."""
    make, name = KINDS[kind]
    node = trained(make).nodes[0]
    before = offsets(node, name)
    with node.loads.saving():
        saved = [
            {
                "state": {key: copied(state) for key, state in part["state"].items()},
                "param_groups": part["param_groups"],
            }
            for part in (optimizer.state_dict() for optimizer in node.optimizers)
        ]
        marks = node.loads.state()
    again = LocalNode(7, make)

    with again.loads.restoring(marks):
        for optimizer, state in zip(again.optimizers, saved, strict=True):
            optimizer.load_state_dict(state)
    with again.loads.load():
        again.vector.load(np.zeros_like(node.delta))

    for one, other in zip(before, offsets(again, name), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    assert again.loads.state() == marks


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


@pytest.mark.parametrize(
    "make",
    [
        lambda model: [AdamW(model.parameters(), lr=0.05, weight_decay=0.5, amsgrad=True)],
        lambda model: [SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)],
        lambda model: [torch.optim.Adagrad(model.parameters(), lr=0.05)],
        lambda model: [torch.optim.Rprop(model.parameters())],
        lambda model: [torch.optim.Adadelta(model.parameters())],
    ],
    ids=["adamw", "momentum", "adagrad", "rprop", "adadelta"],
)
def test_moments_are_no_positions(make: Make) -> None:
    """Also where a large part of the gradient is the weights themselves, by their decay."""
    swarm = trained(make)

    assert all(node.loads.state()["positions"] == [[]] for node in swarm.nodes)


def test_where_prodigy_began_stays() -> None:
    """Its estimate of the rate is a distance from there. Moved along with the weights it would grow without a bound
    where the nodes' data differ."""
    swarm = LocalSwarm(0, 2, differs=True, local_steps=7)
    nodes = [swarm.add(lambda model: [Prodigy(model.parameters())]) for _ in range(2)]
    began = [parameter.detach().clone() for parameter in nodes[0].model.parameters()]

    swarm.run(30)

    for state, first in zip(nodes[0].optimizers[0].state.values(), began, strict=True):
        assert torch.equal(state["p0"], first)
    assert max(node.optimizers[0].param_groups[0]["d"] for node in nodes) < 0.1
    assert swarm.accuracy(nodes[0]) > 0.95


def test_lookahead_does_not_take_back_what_the_others_have_done() -> None:
    """One step with no gradient, in which it goes to its slow weights, leaves a node where it was loaded."""
    swarm = LocalSwarm(0, 1, differs=False, local_steps=5)
    node = swarm.add(lambda model: [Lookahead(SGD(model.parameters(), lr=0.1), k=1)])
    with node.loads.load():
        node.vector.load(np.ones_like(node.delta))
    for parameter in node.model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    node.optimizers[0].step()

    node.vector.cut(node.delta)
    assert np.abs(node.delta).max() < 1e-6


def test_state_that_a_wrapper_shows_of_what_it_wraps_is_moved_once() -> None:
    """As `ScheduleFreeWrapper` does, and Lookahead of timm."""
    parameter = nn.Parameter(torch.ones(4))
    inner = SGD([parameter], lr=0.1)
    inner.state[parameter]["slow"] = torch.full((4,), 1.1)
    wrapper = SimpleNamespace(base=[inner], param_groups=inner.param_groups, state=inner.state, step=inner.step)
    all_optimizers = with_inner([wrapper])
    positions = OptimizerPositions(all_optimizers)

    with positions.relative(), torch.no_grad():
        parameter.fill_(5.0)

    assert all_optimizers == [wrapper, inner]
    torch.testing.assert_close(inner.state[parameter]["slow"], torch.full((4,), 5.1))


def test_state_of_which_nothing_can_be_told_is_looked_at_again() -> None:
    """Where parameters and state are zero."""
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"place": torch.zeros(4), "step": torch.tensor(1.0)}
    positions = OptimizerPositions([optimizer])

    with positions.relative(), torch.no_grad():
        parameter.fill_(5.0)
    assert positions.state() == [[]]
    optimizer.state[parameter]["place"] = torch.full((4,), 5.1)
    positions.look()

    assert positions.state() == [["place"]]


def test_positions_of_another_type_than_the_weights_move_too() -> None:
    """float32 beside bfloat16, as an optimiser for half precision keeps them."""
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"master": torch.full((4,), 1.001)}
    positions = OptimizerPositions([optimizer])

    with positions.relative(), torch.no_grad():
        parameter.fill_(5.0)

    torch.testing.assert_close(optimizer.state[parameter]["master"], torch.full((4,), 5.001))
