"""Optimiser steps are counted where they happen."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from p2pnode.training.trainer.connection import ScriptWarnings
from p2pnode.training.trainer.optimizers.step_count import FIRST_LOOK, MetricMeans, StepCount
from p2pnode.training.trainer_link.messages import FromTrainer


class Loop:
    """A model, its optimisers, and the count of their steps."""

    def __init__(self, optimizers: int = 1) -> None:
        self.net = nn.Linear(4, 2)
        self.optimizers = [torch.optim.SGD(self.net.parameters(), lr=0.1) for _ in range(optimizers)]
        self.warnings = ScriptWarnings()
        self.count = StepCount(self.optimizers, list(self.net.parameters()), self.warnings)

    def step(self, index: int = 0, times: int = 1) -> None:
        for _ in range(times):
            self.net(torch.ones(2, 4)).sum().backward()
            self.optimizers[index].step()

    def found(self, *, may_skip: bool = False) -> list[Any]:
        """What has been found up to the end of this turn, and not been told before."""
        self.count.end_turn(may_skip=may_skip)
        return told(self.warnings)


def told(warnings: ScriptWarnings) -> list[Any]:
    found: list[FromTrainer] = []
    warnings.flush(found.append)
    return found


def test_a_call_counts_the_steps_before_it() -> None:
    """A second call, or one during evaluation, counts none; one for several steps counts them all."""
    loop = Loop()

    loop.step()
    assert loop.count.call() == 1
    assert loop.count.call() == 0
    loop.step(times=4)
    assert loop.count.call() == 4


def test_calls_and_steps_that_differ_are_found_with_both_counts() -> None:
    """The finding goes when they agree again."""
    loop = Loop()
    for _ in range(5):
        loop.step()
        loop.count.call()
        loop.count.call()

    (found,) = loop.found()

    assert found.event == "swarm_steps_differ"
    assert found.message.startswith("swarm.step() was called 10 times for 5 optimiser steps")
    assert found.do
    loop.step()
    loop.count.call()
    assert [one.message for one in loop.found()] == [""]


def test_steps_that_a_scaler_skips_are_no_finding() -> None:
    """They call no optimiser; only where it is more than each second call something else is wrong."""
    loop = Loop()
    for index in range(10):
        loop.step(times=int(index >= 4))
        loop.count.call()

    assert loop.found(may_skip=True) == []


def test_of_two_optimisers_the_one_with_the_fewest_steps_counts() -> None:
    """A critic that steps five times for each step of its generator is one step; so are two that step once each."""
    loop = Loop(2)

    loop.step(0, times=5)
    loop.step(1)
    assert loop.count.call() == 1
    loop.step(0, times=5)
    assert loop.count.call() == 5
    assert loop.found() == []


def test_optimisers_that_step_by_turns_are_no_finding() -> None:
    """One after the other, with a call after each, as layers that are trained one by one: each step counts."""
    loop = Loop(2)

    for index in (0, 0, 1, 1):
        loop.step(index)
        assert loop.count.call() == 1

    assert loop.found() == []


def test_an_optimiser_that_never_steps_is_found_at_once() -> None:
    """Its turn would never end, so that the finding does not wait for it."""
    loop = Loop()
    for _ in range(3 * FIRST_LOOK):
        assert loop.count.call() == 0

    assert [one.message for one in told(loop.warnings)] == [
        f"swarm.step() was called {FIRST_LOOK} times, and SGD, given to attach, took no step"
    ]


@pytest.mark.parametrize("steps_before", [0, 3])
def test_weights_that_change_without_a_step_make_calls_count(steps_before: int) -> None:
    """As with a captured graph, or with an optimiser that was not given: the swarm goes on, and it is said."""
    loop = Loop()
    for _ in range(steps_before):
        loop.step()
        loop.count.call()
    counted = 0
    for _ in range(2 * FIRST_LOOK):
        with torch.no_grad():
            loop.net.weight.add_(0.01)
        counted += loop.count.call()

    (found,) = loop.found()

    assert counted == FIRST_LOOK + 1
    assert found.event == "optimizer_steps_unseen"
    assert "SGD, given to attach, took no step" in found.message


def test_weights_that_were_loaded_are_no_step() -> None:
    """A turn that is cut off loads others between two calls that have none: calls go on counting none."""
    loop = Loop()
    for call in range(4 * FIRST_LOOK):
        if call == FIRST_LOOK // 2:
            with torch.no_grad():
                loop.net.weight.add_(0.01)
            loop.count.loaded()
        assert loop.count.call() == 0


class Around(torch.optim.Optimizer):
    """Wraps an optimiser, as SAM (`own` false: a script calls other methods than `step`) and Lookahead."""

    def __init__(self, inner: torch.optim.Optimizer, own: bool) -> None:
        self.inner, self.own = inner, own
        super().__init__(inner.param_groups, {})

    def second_step(self) -> None:
        self.step() if self.own else self.inner.step()

    def step(self, closure: Any = None) -> None:
        self.inner.step()


@pytest.mark.parametrize("own", [False, True])
def test_the_steps_of_an_optimiser_inside_another_are_counted_once(own: bool) -> None:
    """Those of SAM, which the script makes by two methods of its own, and those of a wrapper that has a `step`."""
    net = nn.Linear(4, 2)
    around = Around(torch.optim.SGD(net.parameters(), lr=0.1), own)
    warnings = ScriptWarnings()
    count = StepCount([around], list(net.parameters()), warnings)

    for _ in range(FIRST_LOOK):
        net(torch.ones(2, 4)).sum().backward()
        around.second_step()
        assert count.call() == 1

    count.end_turn(may_skip=False)
    assert told(warnings) == []


def test_training_on_after_the_end_of_the_run_is_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    """Once; calls without a step are nothing, and neither is one more step of a loop that ends after it."""
    loop = Loop()

    loop.count.after_end()
    loop.step()
    loop.count.after_end()
    loop.count.after_end()
    assert [str(one.message) for one in recwarn] == []
    for _ in range(3):
        loop.step()
        loop.count.after_end()

    (warned,) = [str(one.message) for one in recwarn]
    assert "goes on training after the end of the run" in warned


def test_an_optimiser_without_hooks_is_counted_by_calls() -> None:
    """As DeepSpeed's: there is nothing to compare with."""

    warnings = ScriptWarnings()
    count = StepCount([object()], [torch.zeros(3)], warnings)

    assert [count.call() for _ in range(3)] == [1, 1, 1]
    count.end_turn(may_skip=False)
    assert told(warnings) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step_is_counted() -> None:
    """PyTorch runs the hooks around what it compiles."""
    loop = Loop()
    compiled = torch.compile(loop.optimizers[0].step, backend="eager")
    loop.net(torch.ones(2, 4)).sum().backward()

    compiled()
    compiled()

    assert loop.count.call() == 2


def test_a_forgotten_optimiser_counts_no_more() -> None:
    """The script has made another one."""
    loop = Loop()

    loop.count.forget()
    loop.step()

    assert loop.count.call() == 0


def test_numbers_and_tensors_are_averaged_by_name() -> None:
    """Each name has its own count, and a tensor of any shape with one value counts."""
    means = MetricMeans()
    means.add("loss", 1.0)
    means.add("loss", torch.tensor([[3.0]], requires_grad=True))
    means.add("accuracy", 0.5)

    assert means.means() == {"loss": 2.0, "accuracy": 0.5}


def test_a_loss_that_was_never_given_is_left_out() -> None:
    """NaN is the default of `swarm.step(loss=…)`; after a real loss, and for metrics, it is a value."""
    means = MetricMeans()
    means.add("loss", math.nan)
    assert "loss" not in means
    assert means.means() == {}

    means.add("loss", 1.0)
    means.add("loss", math.nan)
    means.add("norm", math.nan)
    assert math.isnan(means.means()["loss"])
    assert "norm" in means
