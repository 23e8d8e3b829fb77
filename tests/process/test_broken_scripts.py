"""Scripts that would train a model which nobody shares: their node ends, and names what is wrong.

Each ran to its end before, with exit code 0 and a healthy status.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.harness.script_run import Run
from tests.process.harness.swarm_world import START_S

#: Exit code of a node whose trainer cannot go on (docs/config.md).
TRAINER_FAILED = 8

SCRIPT = """\
import torch
from torch import nn
import p2pnode
from p2pnode.training.trainer.lazy_dynamo import import_later

import_later()  # torch's compiler, which no optimizer needs, is half of the start
torch.manual_seed(3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 8).requires_grad_(False)
        self.head = nn.Linear(8, 1)

    def forward(self, inputs):
        return self.head(self.stem(inputs).tanh())


model = Net()
optimizer = torch.optim.AdamW(model.head.parameters(), lr=0.01)
{before}
swarm = p2pnode.attach(model, optimizer)
count = 0
while not swarm.done:
    inputs = torch.randn(32, 4)
    loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True).to(inputs))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    swarm.step(samples=32, loss=loss)
    count += 1
    if count == 4:
        {after}
"""

BOUNDED = ("--set", "training.max_steps=8", "--set", "training.local_steps=2", "--set", "training.linger_s=0")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    started: list[Run] = []

    def start(*flags: str, before: str = "", after: str = "pass") -> Run:
        started.append(Run(tmp_path / str(len(started)), SCRIPT.format(before=before, after=after), *flags))
        return started[-1]

    yield start
    for run in started:
        run.kill()


def test_an_error_of_the_gpu_says_what_to_lower(launch: Callable[..., Run]) -> None:
    """In the log, and in the sentence with which the node ends."""
    full = "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.')"
    run = launch(*BOUNDED, "--set", "training.max_steps=0", after=full)

    assert run.wait() == TRAINER_FAILED, run.out + run.error
    assert "the GPU has too little memory: the trainer ended with exit code 1: torch.OutOfMemoryError" in run.error
    assert "lower the batch size" in run.error


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (
            "",
            "model.stem.requires_grad_(True)",
            "the parameter stem.bias and 1 more was frozen when the script attached",
        ),
        ("", "model.load_state_dict(model.state_dict(), assign=True)", "the parameter stem.weight is another tensor"),
        ("", "model.head = nn.Linear(8, 1)", "the parameter head."),
        (
            "optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)",
            "model.bfloat16(); torch.set_default_dtype(torch.bfloat16)",
            "stem.weight is bfloat16 [8, 4] on cpu, and was float32",
        ),
        ("optimizer = torch.optim.AdamW(Net().parameters())", "pass", "AdamW holds no parameter of the model"),
        ("optimizer = torch.optim.AdamW([model.head.bias])", "pass", "the trainable parameter head.weight is in no"),
        (
            "model.head.bias.data.fill_(float('nan'))",
            "pass",
            "the parameter head.bias has NaN among its initial values",
        ),
        ("model, optimizer = optimizer, model", "pass", "the model is AdamW, not a torch.nn.Module"),
    ],
    ids=["unfrozen", "assigned", "replaced", "converted", "other-model", "half-of-it", "nan", "swapped"],
)
@pytest.mark.promise(21)
def test_a_script_that_nobody_would_share_ends_its_node(
    launch: Callable[..., Run], before: str, after: str, says: str
) -> None:
    """With exit code 8, at the latest at the end of its turn, and with the name of what is wrong."""
    run = launch(*BOUNDED, before=before, after=f"torch.set_grad_enabled(False); {after}; torch.set_grad_enabled(True)")

    assert run.wait() == TRAINER_FAILED, run.out + run.error
    assert says in run.out + run.error


def found(run: Run, *texts: str) -> dict[str, Any]:
    """The status as soon as a finding has all of these texts."""
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        status = run.status()
        if any(all(text in one["what"] for text in texts) for one in status.get("health", ())):
            return status
        assert run.process.poll() is None, run.out + run.error
        time.sleep(0.05)
    raise AssertionError(f"no finding: {run.status().get('health')}")


@pytest.mark.promise(21)
def test_calls_without_an_optimiser_step_count_none_and_are_found(launch: Callable[..., Run]) -> None:
    """Two calls a step: the learning rate's schedule and the swarm's step follow the optimiser, and `/status` has both
    counts."""
    double = "step = swarm.step; swarm.step = lambda **told: (step(**told), step(**told))"

    run = launch("--set", "training.local_steps=5", after=double)
    status = found(run, "swarm.step() was called 10 times for 5 optimiser steps")

    assert abs(status["training"]["optimizer_steps"] - 5 * status["step"]) <= 5
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0


def test_an_optimiser_that_was_not_given_is_found(launch: Callable[..., Run]) -> None:
    """The script trains with another one that it has made after `attach`."""
    run = launch(after="optimizer = torch.optim.SGD(model.head.parameters(), lr=0.01)")

    found(run, "the weights change, and AdamW, given to attach, took no step")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0


def test_a_second_attach_goes_on_with_the_same_swarm(launch: Callable[..., Run]) -> None:
    """As in a loop that begins anew after an error, with a new optimiser; the run ends as any other."""
    again = "optimizer = torch.optim.AdamW(model.head.parameters()); assert p2pnode.attach(model, optimizer) is swarm"

    run = launch(*BOUNDED, after=again)

    assert run.wait() == 0, run.out + run.error


def test_a_second_model_is_named_as_the_reason(launch: Callable[..., Run]) -> None:
    """And not a daemon that has ended, or torchrun."""
    run = launch(*BOUNDED, after="p2pnode.attach(Net(), optimizer)")

    assert run.wait() == TRAINER_FAILED
    assert "this script has attached another model (Net) before, and a node trains one" in run.out + run.error
