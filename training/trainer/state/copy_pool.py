"""Memory of the host into which the states of GPUs are copied for checkpoints, the same again and again.

Fresh memory is given by the kernel page by page, and a GPU copies into it slowly: a step would be held for seconds.
Here memory is registered with the driver once. That takes seconds too, so it is done when a file has been written, by
the thread that wrote it, and helps from the next checkpoint on.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from p2pnode.training.trainer.pinned import register, unregister

#: Each tensor begins at a multiple of this.
ALIGNMENT = 64


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
