"""Memory of the host that a GPU reads and writes by itself: copies are several times as fast, and nobody waits for one.

Elsewhere, and where the driver refuses, memory stays as it is: copies are the same, and slower. `CopyPool` is such
memory for checkpoints. Fresh memory is given by the kernel page by page, and to register it takes seconds, so a step
would be held. So the same memory is used again and again. It is registered by the thread that has written a file, and
helps from the next checkpoint on.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

#: `cudaHostRegisterPortable`: for all devices of this process.
_PORTABLE = 1
#: Each tensor begins at a multiple of this.
ALIGNMENT = 64


def register(memory: Iterable[Tensor], device: torch.device) -> str:
    """Register the memory of these tensors with the driver of a CUDA device, for as long as this process lives.
    Returns why it could not be; empty if it is, and for other devices."""
    if device.type != "cuda":
        return ""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for tensor in memory:
        size_bytes = tensor.numel() * tensor.element_size()
        # As torch does for its own shared memory (torch/cuda/_pin_memory_utils.py).
        if code := int(runtime.cudaHostRegister(tensor.data_ptr(), size_bytes, _PORTABLE)):
            # The next kernel would raise what the driver remembers.
            with contextlib.suppress(RuntimeError, AssertionError):
                torch.zeros(1, device=device)
            return f"the driver cannot register {size_bytes / 1e6:,.0f} MB of the host's memory (cudaError {code})"
    return ""


def unregister(tensor: Tensor, device: torch.device) -> None:
    """Let the driver forget memory that is about to be freed; nothing where it was not registered."""
    if device.type == "cuda" and tensor.is_pinned():
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())  # type: ignore[no-untyped-call]


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether a copy of it comes over a bus."""
    return tensor.is_cuda


class CopyPool:
    """Taken by one checkpoint at a time. `is_pooled` says which tensors are copied into it."""

    def __init__(self, is_pooled: Callable[[Tensor], bool] = is_on_gpu) -> None:
        self._is_pooled = is_pooled
        self._memory: mmap.mmap | None = None
        self._used = 0
        self._taken = threading.Lock()

    def takes(self, tensor: Tensor) -> bool:
        """Whether it is for such tensors; others are copied elsewhere. A subclass may keep its values in other tensors,
        as states of optimisers in eight bits do."""
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        return is_plain and tensor.numel() > 0 and tensor.is_contiguous() and self._is_pooled(tensor)

    def needed_bytes(self, tensors: list[Tensor]) -> int:
        """What copies of those among them would take here that it is for."""
        return sum(map(_place_bytes, filter(self.takes, tensors)))

    def take(self, tensors: list[Tensor]) -> bool:
        """Whether copies of all these fit; the memory is this caller's then, until `release`."""
        size_bytes = self.needed_bytes(tensors)
        if not size_bytes or self._memory is None or not self._taken.acquire(blocking=False):
            return False
        self._used = 0
        if size_bytes > len(self._memory):
            self._taken.release()
            return False
        return True

    def copy(self, tensor: Tensor) -> Tensor:
        """An independent copy on the CPU, complete after `finish`; here if the tensor is one that it `takes`."""
        if not self.takes(tensor):
            return tensor.detach().to("cpu", copy=True)
        part = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=self._used)
        self._used += _place_bytes(tensor)
        return part.view(tensor.shape).copy_(tensor.detach(), non_blocking=True)

    def finish(self, tensors: list[Tensor]) -> None:
        """Wait until the copies of these tensors are complete."""
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.synchronize(device)

    def release(self) -> None:
        """The copies are needed no more."""
        self._taken.release()

    def grow(self, size_bytes: int, device: torch.device) -> None:
        """Have room for so much of a device; not while it is taken."""
        if not size_bytes or not self._taken.acquire(blocking=False):
            return
        try:
            if self._memory is None or size_bytes > len(self._memory):
                if self._memory is not None:
                    unregister(torch.frombuffer(self._memory, dtype=torch.uint8), device)
                    self._memory = None  # before there is more
                memory = mmap.mmap(-1, size_bytes)
                register([torch.frombuffer(memory, dtype=torch.uint8)], device)
                self._memory = memory
        finally:
            self._taken.release()


def _place_bytes(tensor: Tensor) -> int:
    size_bytes = tensor.numel() * tensor.element_size()
    return size_bytes + -size_bytes % ALIGNMENT
