"""What errors of a GPU are called, and what is advised."""

from __future__ import annotations

import pytest

from p2pnode.training.supervisor.gpu_errors import explained
from p2pnode.training.trainer_link.interface import TrainerFailed

FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB "
    "of which 1.20 GiB is free."
)


@pytest.mark.parametrize(
    ("said", "what", "do"),
    [
        (FULL, "too little memory", "batch size"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "too little", ""),
        ("torch.AcceleratorError: CUDA error: device-side assert triggered", "out of range", "CUDA_LAUNCH_BLOCKING"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "not its own", "extensions"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "faulty", "replaced"),
        ("NVRM: Xid (PCI:0000:01:00): 94, pid=7, Contained memory error", "faulty", "replaced"),
        ("NVRM: Xid (PCI:0000:01:00): 79, pid=7, GPU has fallen off the bus.", "is gone", "dmesg"),
        ("RuntimeError: No CUDA GPUs are available", "is gone", "nvidia-smi"),
        ("RuntimeError: Found no NVIDIA driver on your system.", "is gone", "nvidia-smi"),
        ("CUDA error: all CUDA-capable devices are busy or unavailable", "another process", "compute mode"),
    ],
)
def test_an_error_of_a_gpu_says_what_it_is_and_what_to_do(said: str, what: str, do: str) -> None:
    """Before what torch says; whether it is in the exception or in what was printed last."""
    reason = f"the trainer ended with exit code 1: {said}"
    for failure, printed in (
        (TrainerFailed(reason, "see trainer.log", fatal=True), []),
        (TrainerFailed("the trainer ended with signal SIGABRT", "see trainer.log", fatal=True), ["loss 1", said]),
    ):
        found = explained(failure, printed)
        assert what in found.reason
        assert found.reason.endswith(f": {failure.reason}")
        assert do in found.hint
        assert found.hint.endswith("; see trainer.log")
        assert found.fatal
        assert found.cause in found.reason


def test_of_memory_that_is_full_our_share_is_named() -> None:
    """The base of a model in float32; nothing where it is on the host."""
    failure = TrainerFailed(FULL)
    assert "of which p2pnode has 5,200 MB" in explained(failure, own_bytes=5_200_000_000).reason
    assert "p2pnode" not in explained(failure).reason


def test_other_failures_stay_as_they_are() -> None:
    """A fault of the script, and a process that was ended from outside, whatever it printed before."""
    for failure, printed in (
        (TrainerFailed("the trainer ended with exit code 1: ValueError: wrong"), ["loss 1"]),
        (TrainerFailed("the trainer ended with signal SIGKILL", cause=""), [FULL]),
    ):
        assert explained(failure, printed) is failure
