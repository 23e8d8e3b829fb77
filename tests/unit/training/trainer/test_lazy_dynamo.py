"""torch's compiler is not imported by a trainer that compiles nothing, and available to one that compiles."""

from __future__ import annotations

import os
import sys
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

def train():
    torch.manual_seed(7)
    layers = (torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    model = torch.nn.Sequential(*layers)
    for make in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop):
        optimizer = make(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        for _ in range(3):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(torch.randn(12, 8)), torch.randint(0, 4, (12,)))
            loss.backward()
            optimizer.step()
            schedule.step()
        optimizer.load_state_dict(optimizer.state_dict())
    return [parameter.detach().clone() for parameter in model.parameters()]

def same_weights():
    return all(torch.equal(one, other) for one, other in zip(without, train()))

def compiled_step():
    from torch._dynamo import config
    found = [config.recompile_limit > 0, sys.modules["torch._dynamo"] is torch._dynamo, "sympy" in sys.modules]
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    start = model.bias.detach().clone()

    @torch.compile(backend="eager")
    def step():
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    step()
    return found, torch.equal(model.bias.detach(), start - 1.0)

from p2pnode.training.trainer.lazy_dynamo import import_later
import_later()
torch.set_num_threads(1)
without = train()
print("loaded", sorted(name for name in sys.modules if name.startswith(("torch._dynamo.", "sympy"))), flush=True)
print("compiled_step", compiled_step(), flush=True)
print("same_weights", same_weights(), "torch._dynamo.utils" in sys.modules, flush=True)
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a process prints that has imported torch alone; its import state is its own."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "program.py").write_text(PROGRAM)
    with (folder / "printed").open("w") as output, (folder / "errors").open("w") as errors:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = Forked(
            with_torch(), [str(folder / "program.py")], cwd=ROOT, env=environment, stdout=output, stderr=errors
        )
        code = process.wait(100)
    assert code == 0, (folder / "errors").read_text()
    return (folder / "printed").read_text().splitlines()


def test_training_imports_no_compiler_and_gives_the_same_weights(printed: list[str]) -> None:
    """Three optimizers with a schedule: nothing of dynamo or sympy is loaded, and the weights are those with it."""
    assert printed[0] == "loaded []"
    assert printed[2] == "same_weights True True"


def test_who_compiles_gets_the_compiler(printed: list[str]) -> None:
    """torch.compile of a model and of a whole step, settings, and names imported from it all find the real module."""
    assert printed[1] == "compiled_step ([True, True, True], True)"


def test_what_is_loaded_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that was imported with the compiler keeps the module it knows."""
    real = ModuleType("torch._dynamo")
    monkeypatch.setitem(sys.modules, "torch._dynamo", real)
    monkeypatch.setitem(vars(torch), "_dynamo", real)

    import_later()

    assert sys.modules["torch._dynamo"] is vars(torch)["_dynamo"] is real
