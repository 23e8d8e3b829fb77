"""What the machine says of its GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from p2pnode.training.devices import gpus
from p2pnode.training.devices.gpus import torch_cuda, unused_gpu


@pytest.fixture
def a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a driver with one GPU, and no setting that hides it."""
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    monkeypatch.setattr(gpus, "NVIDIA_GPUS", tmp_path / "gpus")
    monkeypatch.setattr(gpus, "NVIDIA_NODES", (tmp_path / "nvidia0",))
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    return tmp_path


def test_the_cuda_of_torch_is_read_without_importing_it() -> None:
    """As torch itself says."""
    assert torch_cuda() == (torch.version.cuda or "")


@pytest.mark.usefixtures("a_gpu")
def test_a_gpu_that_is_not_used_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an "auto" that takes the CPU; not by a user who wants the CPU, or hides the GPU."""
    built, driver = unused_gpu("auto", "", is_available=False), unused_gpu("auto", "12.8", is_available=False)
    assert built is not None
    assert driver is not None
    assert "built without CUDA" in built[0]
    assert "driver" in driver[0]
    assert unused_gpu("auto", "12.8", is_available=True) is None
    assert unused_gpu("cpu", "", is_available=False) is None
    monkeypatch.setenv(gpus.VISIBLE, "")
    assert unused_gpu("auto", "", is_available=False) is None


def test_a_machine_without_a_gpu_has_none_to_use(a_gpu: Path) -> None:
    """A device node alone is one, as in a container."""
    (a_gpu / "gpus" / "0000:01:00.0").rmdir()
    (a_gpu / "gpus").rmdir()
    assert unused_gpu("auto", "", is_available=False) is None
    (a_gpu / "nvidia0").touch()
    assert unused_gpu("auto", "", is_available=False) is not None
