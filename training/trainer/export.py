"""Writes the model as a file of its own: safetensors, or a plain `state_dict` for other file names."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from training.trainer.snapshot import write_whole
from training.trainer.vector import bare_model, canonical_name


def export(model: nn.Module, path: Path) -> None:
    """Write the model's `state_dict`, on the CPU, under the bare model's names. Raises `CannotWrite`.

    Tied tensors are written under each of their names, so that a strict `load_state_dict` finds all.
    """
    state = {canonical_name(name): value for name, value in bare_model(model).state_dict().items()}
    if path.suffix == ".safetensors":
        tensors = {name: _own(value) for name, value in state.items() if isinstance(value, Tensor)}
        write_whole(path, lambda temporary: save_file(tensors, temporary, metadata={"format": "pt"}))
    else:
        plain = {name: _own(value) if isinstance(value, Tensor) else value for name, value in state.items()}
        write_whole(path, lambda temporary: torch.save(plain, temporary))


def _own(tensor: Tensor) -> Tensor:
    """A copy with its own storage, as safetensors requires."""
    return tensor.detach().to("cpu", copy=True).contiguous()
