"""Memory of the host that a GPU reads and writes by itself: copies are several times as fast, and nobody waits for one.

Elsewhere, and where the driver refuses, memory stays as it is: copies are the same, and slower.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

#: `cudaHostRegisterPortable`: for all devices of this process.
_PORTABLE = 1


def register(memory: Iterable[Tensor], device: torch.device, runtime: Any = None) -> str:
    """Register the memory of these tensors with the driver of a CUDA device, for as long as this process lives.
    Returns why it could not be; empty if it is, and for other devices. `runtime` is that of CUDA."""
    if device.type != "cuda":
        return ""
    runtime = runtime or torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for tensor in memory:
        size_bytes = tensor.numel() * tensor.element_size()
        # As torch does for its own shared memory (torch/cuda/_pin_memory_utils.py).
        if code := int(runtime.cudaHostRegister(tensor.data_ptr(), size_bytes, _PORTABLE)):
            with contextlib.suppress(
                RuntimeError, AssertionError
            ):  # the next kernel would raise what the driver remembers
                torch.zeros(1, device=device)
            return f"the driver cannot register {size_bytes / 1e6:,.0f} MB of the host's memory (cudaError {code})"
    return ""


def unregister(tensor: Tensor, device: torch.device, runtime: Any = None) -> None:
    """Let the driver forget memory that is about to be freed; nothing where it was not registered."""
    if device.type == "cuda" and tensor.is_pinned():
        (runtime or torch.cuda.cudart()).cudaHostUnregister(tensor.data_ptr())  # type: ignore[no-untyped-call]
