"""A checkpoint's vector as a plain PyTorch `state_dict`: `python -m training.trainer.convert IN.safetensors OUT.pt`.

Runs in a process of its own, because the command line never imports torch. What is not in the vector (frozen tensors,
integer buffers) is not in the file either: load it with `strict=False` where a model has such.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file


def convert(source: str, target: str) -> None:
    """Read safetensors, write what `torch.load(target, weights_only=True)` reads."""
    torch.save(load_file(source), target)


if __name__ == "__main__":
    convert(*sys.argv[1:3])
