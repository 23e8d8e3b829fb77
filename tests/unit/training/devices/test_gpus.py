"""What the machine says of its GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from p2pnode.training.devices import gpus
from p2pnode.training.devices.gpus import named_devices, threads_each, torch_cuda, unused_gpu


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


# -- the setting `training.device`


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("auto", ["auto"]),
        (["all"], ["all"]),
        ("cpu*3", ["cpu"] * 3),
        ("cpu * 2", ["cpu"] * 2),
        ("cuda:0,cuda:1", ["cuda:0", "cuda:1"]),
        (["cuda:0", "cpu*2"], ["cuda:0", "cpu", "cpu"]),
    ],
)
def test_devices_are_read_as_list_or_text(setting: str | list[str], expected: list[str]) -> None:
    """A list, a text with commas and a count give one name per trainer."""
    assert named_devices(setting) == expected


@pytest.mark.parametrize("setting", [[], "", "cpu*0", "0", "gpu zero", ["all", "cpu"], "cpu*65", ["cuda:-1"], ","])
def test_a_setting_without_devices_is_refused(setting: str | list[str]) -> None:
    """An empty list, a number and a slip say what is wrong."""
    with pytest.raises(ValueError, match=r"device|list|all"):
        named_devices(setting)


def test_threads_are_divided_among_the_trainers() -> None:
    """Several trainers share the threads that were set, or the cores; a single one has its own choice."""
    assert threads_each(0, 1, 16) == 0
    assert threads_each(3, 1, 16) == 3
    assert threads_each(0, 4, 16) == 4
    assert threads_each(6, 4, 16) == 1
    assert threads_each(0, 8, 2) == 1
