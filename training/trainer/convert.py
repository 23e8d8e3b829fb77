"""A checkpoint's vector as a plain PyTorch `state_dict`: `python -m training.trainer.convert IN.safetensors OUT.pt`.

Runs in a process of its own, because the command line never imports torch. Frozen tensors and integer buffers are not
in the vector, hence not in the file: load it with `strict=False` if the model has any.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file


def convert(source: str, target: str) -> None:
    """Read safetensors and write a file for `torch.load(target, weights_only=True)`."""
    torch.save(load_file(source), target)


if __name__ == "__main__":
    convert(*sys.argv[1:3])
