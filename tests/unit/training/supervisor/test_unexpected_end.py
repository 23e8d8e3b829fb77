"""Reasons, hints and causes of processes that ended without saying why."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2pnode.training.supervisor import kernel
from p2pnode.training.supervisor.gpu_errors import explained
from p2pnode.training.supervisor.process import OutputLog, unexpected_end
from p2pnode.training.trainer_link.interface import TrainerFailed
from tests.unit.training.supervisor.test_printed_end import CHAINED, SCRIPT, SECONDARY, torchrun


def failure_of(folder: Path, code: int, printed: str = "", *, ran_out: bool = False) -> TrainerFailed:
    """Of a process of which it is not known that it can train."""
    output = OutputLog(folder / "trainer.log")
    output.write(printed.encode())
    asyncio.run(output.end())
    process: Any = SimpleNamespace(returncode=code, memory_ran_out=ran_out)
    return unexpected_end(process, output, is_fatal=True)


def test_an_exception_is_the_reason_and_the_cause(tmp_path: Path) -> None:
    """Behind a launcher's banner, and whatever the numbers in it; the hint has the last lines."""
    failed = failure_of(tmp_path, 1, CHAINED + SECONDARY + torchrun(1))
    assert failed.reason == "the trainer ended with exit code 1: ValueError: wrong: 17"
    assert "trainer.log" in failed.hint
    assert failed.fatal

    again = failure_of(tmp_path, 1, SCRIPT.replace("17", "18"))
    assert again.reason.endswith("wrong: 18")
    assert again.cause == failed.cause


@pytest.mark.parametrize(
    ("code", "printed", "reason", "cause"),
    [
        (3, "loss 0.25\n", "the trainer ended with exit code 3: loss 0.25", "exit code 3"),
        (1, torchrun(3), "the trainer ended with exit code 3", "exit code 3"),
        (-11, "", "the trainer ended with signal SIGSEGV: it printed nothing", "signal SIGSEGV"),
        (1, SECONDARY + torchrun(-11), "the trainer ended with signal SIGSEGV", "signal SIGSEGV"),
        (-9, "loss 0.25\n", "the trainer ended with signal SIGKILL: loss 0.25", ""),
        (143, "", "the trainer ended with signal SIGTERM: it printed nothing", ""),
    ],
)
def test_a_code_or_a_signal_is_the_cause_where_there_is_no_exception(
    tmp_path: Path, code: int, printed: str, reason: str, cause: str
) -> None:
    """What was printed last is no part of the cause, and who ends a process from outside is none. A signal may pass."""
    failed = failure_of(tmp_path, code, printed)
    assert (failed.reason, failed.cause, failed.fatal) == (reason, cause, "exit code" in reason)


def test_a_process_that_the_kernel_killed_for_memory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the limit, and what to lower; under torchrun too. An exception is the reason even if a process was killed
    meanwhile."""
    monkeypatch.setattr(kernel, "limit_bytes", lambda: 512_000_000)
    for failed in (
        failure_of(tmp_path, -9, "loss 0.25\n", ran_out=True),
        failure_of(tmp_path, 1, SECONDARY + torchrun(-9), ran_out=True),
    ):
        assert "because the memory limit of 512 MB of its control group was reached" in failed.reason
        assert "batch size" in failed.hint
        assert failed.cause
        assert not failed.fatal
    assert "ValueError" in failure_of(tmp_path, 1, SCRIPT, ran_out=True).reason


def test_a_script_that_ends_without_training_is_told_what_to_call(tmp_path: Path) -> None:
    """Another start would end in the same way."""
    failed = failure_of(tmp_path, 0)
    assert "before the swarm was done" in failed.reason
    assert "attach" in failed.hint
    assert failed.fatal


# -- what errors of a GPU are called, and what is advised


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
