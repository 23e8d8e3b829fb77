"""A checkpoint's vector as a file that plain PyTorch reads."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from p2pnode.training.trainer.convert import convert


def test_tensors_are_the_same_without_this_program(tmp_path: Path) -> None:
    """`torch.load(weights_only=True)` gives names, shapes, types and values of the safetensors file."""
    state = {"0.weight": torch.randn(3, 2), "0.bias": torch.zeros(3, dtype=torch.bfloat16)}
    save_file(state, tmp_path / "in.safetensors")

    convert(str(tmp_path / "in.safetensors"), str(tmp_path / "out.pt"))

    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
