"""A safetensors file as a plain PyTorch `state_dict`: `python -m training.trainer.convert IN.safetensors OUT.pt`.

Runs in a process of its own, because neither daemon nor command line imports torch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file


def convert(source: str, target: str) -> None:
    """Read safetensors and write a file for `torch.load(target, weights_only=True)`."""
    with Path(target).open("wb") as file:  # given a path, torch would write the file's name into the file
        torch.save(load_file(source), file)
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    convert(*sys.argv[1:3])
