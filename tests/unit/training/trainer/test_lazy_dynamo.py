"""torch's compiler stays out of a trainer that compiles nothing, and is there for one that does."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[4]

TRAIN = """
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
"""


def run(program: str) -> str:
    """What a fresh interpreter prints; its import state is its own."""
    found = subprocess.run(
        [sys.executable, "-c", TRAIN + textwrap.dedent(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_training_imports_no_compiler_and_gives_the_same_weights() -> None:
    """Three optimizers with a schedule: nothing of dynamo or sympy is loaded, and the weights are those with it."""
    printed = run("""
        from training.trainer.lazy_dynamo import import_later
        import_later()
        without = train()
        print(sorted(name for name in sys.modules if name.startswith(("torch._dynamo.", "sympy"))))
        import torch._dynamo.utils
        print(all(torch.equal(one, other) for one, other in zip(without, train())))
    """)

    assert printed.splitlines() == ["[]", "True"]


def test_who_compiles_gets_the_compiler() -> None:
    """torch.compile of a model and of a whole step, settings, and names imported from it all find the real module."""
    printed = run("""
        from training.trainer.lazy_dynamo import import_later
        import_later()
        before = train()
        from torch._dynamo import config
        print(config.recompile_limit > 0, sys.modules["torch._dynamo"] is torch._dynamo, "sympy" in sys.modules)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        start = model.bias.detach().clone()

        @torch.compile(backend="eager")
        def step():
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()

        step()
        print(torch.equal(model.bias.detach(), start - 1.0))
    """)

    assert printed.splitlines() == ["True True True", "True"]


def test_what_is_loaded_already_stays() -> None:
    """A task that was imported with the compiler keeps the module it knows."""
    printed = run("""
        import torch._dynamo
        real = torch._dynamo
        from training.trainer.lazy_dynamo import import_later
        import_later()
        print(torch._dynamo is real, sys.modules["torch._dynamo"] is real)
    """)

    assert printed == "True True"
