"""torch's compiler is not imported by a trainer that compiles nothing, and available to one that compiles."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from p2pnode.training.trainer.lazy_dynamo import import_later
from tests.harness.project.repository import ROOT
from tests.process.harness.forked_python import Forked, with_torch

#: A process that has imported torch trains with the stand-in, then uses the compiler, and then trains with the real
#: module, which is loaded by then.
PROGRAM = """
import sys
import torch
from torch import nn

def train():
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    for make in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop):
        optimizer = make(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.randn(12, 8)), torch.randint(0, 4, (12,))).backward()
            optimizer.step()
            schedule.step()
        optimizer.load_state_dict(optimizer.state_dict())
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

from p2pnode.training.trainer.lazy_dynamo import import_later
import_later()
torch.set_num_threads(1)
without = train()
assert not [name for name in sys.modules if name.startswith(("torch._dynamo.", "sympy"))]

from torch._dynamo import config
assert config.recompile_limit > 0 and sys.modules["torch._dynamo"] is torch._dynamo and "sympy" in sys.modules
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
start = model.bias.detach().clone()

@torch.compile(backend="eager")
def step():
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()

step()
assert torch.equal(model.bias.detach(), start - 1.0)
assert torch.equal(without, train()) and "torch._dynamo.utils" in sys.modules
"""


def test_who_compiles_gets_the_compiler_and_who_does_not_imports_none_of_it(tmp_path: Path) -> None:
    """Three optimisers with a schedule load nothing of it and have the same weights as with it. A whole step that is
    compiled, settings, and names imported from it find the real module."""
    (tmp_path / "program.py").write_text(PROGRAM)
    with (tmp_path / "printed").open("w") as output:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        program = [str(tmp_path / "program.py")]
        process = Forked(with_torch(), program, cwd=ROOT, env=environment, stdout=output, stderr=output)

        assert process.wait(100) == 0, (tmp_path / "printed").read_text()


def test_what_is_loaded_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that was imported with the compiler keeps the module it knows."""
    real = ModuleType("torch._dynamo")
    monkeypatch.setitem(sys.modules, "torch._dynamo", real)
    monkeypatch.setitem(vars(torch), "_dynamo", real)

    import_later()

    assert sys.modules["torch._dynamo"] is vars(torch)["_dynamo"] is real
