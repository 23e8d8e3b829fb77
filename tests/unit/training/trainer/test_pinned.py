"""Registering the host's memory with the driver of a GPU."""

from __future__ import annotations

import pytest
import torch

from p2pnode.training.trainer.pinned import register


class Runtime:
    """A driver that takes so many bytes in one piece."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken: list[tuple[int, int, int]] = []

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        if size_bytes > self.limit:
            return 2
        self.taken.append((address, size_bytes, flags))
        return 0


GPU = torch.device("cuda", 0)


def test_memory_is_registered_whole() -> None:
    """Address, bytes and the flag for all devices."""
    runtime, values = Runtime(100), torch.zeros(25)

    assert register([values], GPU, runtime) == ""
    assert runtime.taken == [(values.data_ptr(), 100, 1)]


def test_what_the_driver_refuses_is_said() -> None:
    """Copies are as before then, and slower."""
    runtime = Runtime(99)

    assert register([torch.zeros(2), torch.zeros(25)], GPU, runtime).endswith("(cudaError 2)")
    assert len(runtime.taken) == 1


def test_a_processor_needs_none() -> None:
    """Its copies are of its own memory."""
    assert register([torch.zeros(25)], torch.device("cpu"), Runtime(0)) == ""


@pytest.mark.cuda
def test_a_gpu_copies_from_registered_memory() -> None:
    """torch finds it pinned."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    values = torch.arange(1 << 20, dtype=torch.float32)

    assert register([values], GPU) == ""
    assert values.is_pinned()
    assert torch.equal(values.to(GPU, non_blocking=True).cpu(), values)
