"""Optimisers with two modes: what is exchanged, evaluated and saved is what the swarm has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import AdamW

from p2pnode.training.trainer.optimizers.schedule_free import ScheduleFree
from p2pnode.training.trainer_link.interface import TrainerFailed
from tests.harness.trainers.local_nodes import LocalNode, LocalSwarm
from tests.harness.trainers.optimizers import Modes, SGDScheduleFree


def make(model: nn.Module) -> list[Any]:
    return [SGDScheduleFree(model.parameters(), lr=0.5)]


def swarm(count: int = 2, *, differs: bool = True, late: int = 0) -> LocalSwarm:
    found = LocalSwarm(0, count, differs=differs, local_steps=5, late=late)
    for _ in range(count):
        found.add(make)
    return found


def values(node: LocalNode) -> np.ndarray:
    found = np.zeros_like(node.delta)
    node.vector.read(found)
    return found


@pytest.mark.parametrize("late", [0, 2])
def test_at_the_end_eval_changes_nothing(late: int) -> None:
    """All nodes have the shared weights then, in both modes of the optimiser, as its file has them."""
    found = swarm(late=late)

    found.run(40, ends=True)

    for node in found.nodes:
        for switch in (node.optimizers[0].eval, node.optimizers[0].train, node.optimizers[0].eval):
            switch()
            assert np.array_equal(values(node), found.value)
    assert found.accuracy(found.nodes[0]) > 0.98


@pytest.mark.parametrize("begins_training", [True, False])
@pytest.mark.parametrize("calls", [(), ("eval",), ("eval", "train"), ("train",)])
def test_shared_weights_are_the_same_in_all_modes(begins_training: bool, calls: tuple[str, ...]) -> None:
    """Whatever is called before, and what inside of the block; afterwards the node has its own again, and trains on in
    the mode that the script has asked for last."""
    found = swarm()
    found.run(10)
    node = found.nodes[0]
    node.step(torch.randn(32, 16), torch.randint(0, 8, (32,)), 2)
    optimizer, own = node.optimizers[0], values(node)
    if not begins_training:
        optimizer.eval()

    with node.loads.shared(lambda: True):
        seen = [values(node)]
        for call in calls:
            getattr(optimizer, call)()
            seen.append(values(node))

    for one, call in zip(seen, ("", *calls), strict=True):
        assert call == "train" or np.allclose(one, found.value, atol=1e-6)
    is_training = begins_training or "train" in calls
    assert optimizer.param_groups[0]["train_mode"] is is_training
    optimizer.train()
    assert np.allclose(values(node), own, atol=1e-5)


def test_newer_weights_that_were_loaded_inside_are_kept() -> None:
    """As `swarm.leave()` loads them: what the node had before is gone."""
    found = swarm()
    found.run(10)
    node, newer = found.nodes[0], np.full_like(found.value, 0.5)

    with node.loads.shared(lambda: False), node.loads.load(ends=True):
        node.vector.load(newer)

    assert np.array_equal(values(node), newer)


def test_what_is_exchanged_does_not_depend_on_the_mode() -> None:
    """A turn may end while the script evaluates, as where its data end."""
    found = swarm()
    found.run(10)
    node = found.nodes[0]
    expected = values(node)
    node.optimizers[0].eval()

    with node.loads.exchanging():
        exchanged = values(node)

    assert np.allclose(exchanged, expected, atol=1e-6)
    assert not np.allclose(values(node), expected, atol=1e-3)


def test_a_load_in_the_mode_for_evaluation_is_one_in_the_other() -> None:
    """The weights that training goes on from are those that were loaded."""
    found = swarm()
    found.run(10)
    node, loaded = found.nodes[0], np.full_like(found.value, 0.5)
    node.optimizers[0].eval()

    with node.loads.load():
        node.vector.load(loaded)

    assert not node.optimizers[0].param_groups[0]["train_mode"]
    node.optimizers[0].train()
    assert np.allclose(values(node), loaded, atol=1e-5)


def test_a_late_joiner_averages_as_if_it_had_been_there() -> None:
    """Its first steps have the weights of those of the others; each would count as the first of all otherwise, and its
    delta would be many times as long as theirs."""
    found = LocalSwarm(0, 3, differs=False, local_steps=5)
    for _ in range(2):
        found.add(make)
    found.run(40)
    before = found.accuracy(found.nodes[0])
    joiner = found.add(make)

    found.run(1)

    sums = [node.optimizers[0].param_groups[0]["weight_sum"] for node in found.nodes]
    assert sums == pytest.approx([sums[0]] * 3)
    sizes = [float(np.linalg.norm(node.delta)) for node in found.nodes]
    assert sizes[2] < 4 * sizes[0]
    assert found.accuracy(joiner) > before - 0.01


@pytest.mark.parametrize(("r", "expected"), [(0.0, 0.25 * 10), (1.0, 0.25 * 55)])
def test_missed_steps_have_their_weights(r: float, expected: float) -> None:
    """Step k has (k + 1)^r times the square of the rate."""
    optimizer = SGDScheduleFree([nn.Parameter(torch.ones(2))], lr=0.5)
    optimizer.param_groups[0]["r"] = r
    modes = ScheduleFree([optimizer, AdamW([nn.Parameter(torch.ones(2))])])

    modes.seek(4)
    modes.count(6)
    modes.seek(10)
    assert modes.counted == 10
    modes.seek(3)
    modes.seek(3)

    first = 0.25 * sum((step + 1) ** r for step in range(4))
    assert optimizer.param_groups[0]["weight_sum"] == pytest.approx(first)
    modes.counted = 4
    modes.seek(10)
    assert optimizer.param_groups[0]["weight_sum"] == pytest.approx(expected)


def test_modes_of_an_unknown_kind_are_refused() -> None:
    """Also inside of another optimiser, and with a known name where the mode cannot be read."""
    parameter = nn.Parameter(torch.ones(2))
    silent = SGDScheduleFree([parameter], lr=0.5)
    del silent.param_groups[0]["train_mode"]

    for one in (Modes([parameter]), silent):
        with pytest.raises(TrainerFailed, match=rf"{type(one).__name__} has train\(\) and eval\(\)") as failure:
            ScheduleFree([AdamW([parameter]), one])
        assert failure.value.fatal
