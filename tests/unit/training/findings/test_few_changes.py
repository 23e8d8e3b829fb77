"""Finding weights in half precision whose changes are rounded away."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from p2pnode.training.findings.few_changes import LOOKS, STEPS_BETWEEN, FewChanges
from p2pnode.training.layout import Layout, LayoutEntry
from p2pnode.training.trainer.model.vector import ModelVector

ROWS, COLUMNS = 300, 200
SIZE = ROWS * COLUMNS
#: Deltas until a finding.
ENOUGH = LOOKS * STEPS_BETWEEN


def layout_of(dtype: str, shape: tuple[int, ...] = (ROWS, COLUMNS), kind: str = "parameter") -> Layout:
    return Layout((LayoutEntry("weight", shape, dtype, kind, 0, SIZE),))  # type: ignore[arg-type]


def after(layout: Layout, delta: np.ndarray, count: int = ENOUGH) -> FewChanges:
    found = FewChanges(layout)
    for _ in range(count):
        found.after_training(delta)
    return found


def scattered(share: float) -> np.ndarray:
    return (np.random.default_rng(1).random(SIZE) < share).astype(np.float32)


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.026, 0.05])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_few_changed_values_of_half_precision_are_a_finding(share: float, dtype: str) -> None:
    """However few; after two looks in a row, and no longer than it is so."""
    found = after(layout_of(dtype), scattered(share))
    assert found.dtype == dtype
    assert found.share is not None
    assert found.share < 0.1
    assert after(layout_of(dtype), scattered(share), ENOUGH - 1).share is None

    for _ in range(STEPS_BETWEEN):
        found.after_training(scattered(0.5))
    assert found.share is None


@pytest.mark.parametrize(
    ("layout", "delta"),
    [
        (layout_of("float32"), scattered(0.01)),
        (layout_of("bfloat16", kind="buffer"), scattered(0.01)),
        (layout_of("bfloat16", shape=(SIZE,)), scattered(0.01)),
        (layout_of("bfloat16"), scattered(0.2)),
        # One row in fifty, as an embedding's, and one column in fifty, as of inputs that are mostly zero.
        (layout_of("bfloat16"), np.repeat(np.arange(ROWS) % 50 == 0, COLUMNS).astype(np.float32)),
        (layout_of("bfloat16"), np.tile(np.arange(COLUMNS) % 50 == 0, ROWS).astype(np.float32)),
    ],
    ids=["float32", "buffer", "vector", "a fifth", "rows", "columns"],
)
def test_what_may_change_little_is_no_finding(layout: Layout, delta: np.ndarray) -> None:
    """Weights with room for small changes, and gradients that are zero for whole rows or columns."""
    assert after(layout, delta).share is None


@pytest.mark.parametrize(
    ("rate", "dtype", "told"), [(1e-5, "bfloat16", True), (1e-2, "bfloat16", False), (1e-5, "float32", False)]
)
def test_a_model_in_bfloat16_with_a_small_rate_is_found(rate: float, dtype: str, told: bool) -> None:
    """With AdamW; a larger rate, and the same in float32, is trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to(getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model_vector = ModelVector(model)
    vector, delta = np.zeros((2, model_vector.layout.total), np.float32)
    model_vector.read(vector)
    found = FewChanges(model_vector.layout)
    for _ in range(ENOUGH):
        model_vector.load(vector)
        inputs = torch.randn(16, 64, dtype=getattr(torch, dtype))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs.flip(1)).backward()
        optimizer.step()
        model_vector.cut(delta)
        vector += delta
        found.after_training(delta)
    assert (found.share is not None) == told
