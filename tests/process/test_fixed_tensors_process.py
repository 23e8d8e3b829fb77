"""Real nodes with scripts whose models have tensors that are not exchanged: they are compared when a node joins."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from p2pnode.errors import ExitCode
from tests.process.test_run_command import Run, address_of, launch

__all__ = ["launch"]

#: Packed weights of four bits with a scale, as a quantised layer keeps them in buffers; the seed decides them.
SCRIPT = """
import sys
import time
import torch
from torch import nn
from p2pnode.training.trainer.lazy_dynamo import import_later

import_later()
import p2pnode


class Packed(nn.Module):
    def __init__(self, seed):
        super().__init__()
        codes = torch.randint(0, 256, (8, 8), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
        self.register_buffer("codes", codes)
        self.adapter = nn.Linear(16, 1)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, inputs):
        weights = torch.cat([self.codes & 15, self.codes >> 4], 1).float() / 8 - 1
        return self.adapter(inputs @ weights) * self.scale.float()


torch.manual_seed(0)
model = Packed(int(sys.argv[2]))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
swarm = p2pnode.attach(model, optimizer)
while not swarm.done:
    optimizer.zero_grad()
    inputs = torch.randn(16, 8)
    loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    time.sleep(0.02)  # the cores are left to the other nodes
    swarm.step(samples=16, loss=loss)
"""


FLAGS = ("training.max_steps=12", "training.local_steps=1", "training.min_nodes=2", "training.linger_s=20")

#: One of the two nodes writes into a buffer of the model.
CHANGING = SCRIPT.replace(
    "    optimizer.step()\n", "    optimizer.step()\n    if swarm.node_index:\n        model.codes[0] = 0\n"
)


@pytest.mark.timeout(300)
def test_a_node_whose_integer_buffer_differs_is_refused_by_its_name(launch: Callable[..., Run]) -> None:
    """Quantised weights are the same on all nodes, or the node is no member."""
    founder = launch(SCRIPT, "--set", "training.max_seconds=120")
    other = launch(SCRIPT, "--bootstrap", address_of(founder), "--set", "training.max_seconds=120")

    assert other.wait() == ExitCode.MISMATCH
    assert "frozen: mine codes uint8 [8, 8] " in other.error
    assert "exchange what is made anew or follows the model, as a teacher, with include_frozen=True" in other.error


@pytest.mark.timeout(300)
def test_an_integer_buffer_that_changes_is_named_where_the_models_are_compared(launch: Callable[..., Run]) -> None:
    """The node that changes it warns while it trains; at the end the one that has other values than the owner of the
    first shard says that the files may differ, and why. Both are told of weights that are rounded."""
    same = CHANGING.replace("int(sys.argv[2])", "0")
    flags = [part for flag in FLAGS for part in ("--set", flag)]
    founder = launch(same, *flags)
    joiner = launch(same, "--bootstrap", address_of(founder), *flags)

    assert [run.wait() for run in (founder, joiner)] == [0, 0]
    assert (
        "it may differ from the model of other nodes: training has changed tensors (codes)" in founder.out + joiner.out
    )
    assert ["fixed_tensor_changed" in run.error for run in (founder, joiner)].count(True) == 1
    assert [run.error.count("scale is float64: the swarm's values are float32") for run in (founder, joiner)] == [1, 1]
