"""Batches and metrics of any shape; and, without the library of a callback, what its import says."""

from __future__ import annotations

import importlib
import math
import sys
from collections import UserDict
from typing import Any

import pytest
import torch

from p2pnode.integrations.divided_data import batch_size, mean, numbers


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(5, 3), 5),
        ((torch.zeros(4), torch.zeros(7)), 4),
        ({"text": ["a", "b"], "ids": torch.zeros(2, 9)}, 2),
        (UserDict(ids=torch.zeros(6)), 6),
        ([[], {"scalar": torch.tensor(1.0)}, [torch.zeros(3)]], 3),
        ("text", 0),
        (None, 0),
        (torch.tensor(1.0), 0),
    ],
)
def test_a_batch_has_the_size_of_its_first_tensor(batch: Any, size: int) -> None:
    """Tensors, pairs, mappings and nests of them; 0 where there is none."""
    assert batch_size(batch) == size


def test_a_mean_is_taken_without_reading_the_values() -> None:
    """It stays a tensor on its device, in float32 also for losses in bfloat16; of nothing it is NaN."""
    found = mean([torch.tensor(1.0), torch.tensor(2.0, dtype=torch.bfloat16)])

    assert isinstance(found, torch.Tensor)
    assert (found.dtype, float(found)) == (torch.float32, 1.5)
    assert math.isnan(mean([]))


def test_metrics_are_the_scalars_with_a_prefix() -> None:
    """What has another name, or is no single number, is left out."""
    metrics = {
        "eval_loss": 0.5,
        "eval_accuracy": torch.tensor(0.75),
        "eval_n": 3,
        "eval_table": torch.zeros(2),
        "eval_name": "x",
        "epoch": 1.0,
    }

    assert numbers(metrics, ("eval_",)) == {"loss": 0.5, "accuracy": 0.75, "n": 3.0}


@pytest.mark.parametrize("package", ["transformers", "lightning"])
def test_a_missing_package_names_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ImportError with the command, and the library's own error behind it."""
    module = f"p2pnode.integrations.{package}"
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]  # as if it were not installed
    monkeypatch.delitem(sys.modules, module, raising=False)

    with pytest.raises(ImportError, match=rf'pip install "p2pnode\[{package}\]"') as failure:
        importlib.import_module(module)
    assert isinstance(failure.value.__cause__, ImportError)
