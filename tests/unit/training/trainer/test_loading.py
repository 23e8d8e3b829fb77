"""Loading a task: every fault is one sentence with a hint, and fatal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from p2pnode.training.trainer.convert import convert
from p2pnode.training.trainer.loading import build_task, load_task, resolve_device
from p2pnode.training.trainer_link.interface import TrainerFailed


def failure_of(name: str, data_dir: str = "") -> TrainerFailed:
    with pytest.raises(TrainerFailed) as failure:
        build_task(name, {}, data_dir=data_dir, seed=0, node_seed=1, device="cpu")
    assert failure.value.fatal
    assert failure.value.hint
    assert "\n" not in failure.value.reason
    return failure.value


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("digit", 'training.task = "digit" names no task'),
        ("no_such_module:Task", "does not import: ModuleNotFoundError: No module named 'no_such_module'"),
        ("tests.harness.trainers.tasks:Nothing", "the module tests.harness.trainers.tasks has no Nothing"),
        ("tests.harness.trainers.tasks:NoTask", "is not a task: it lacks build, batches, loss, evaluate"),
        ("tests.harness.trainers.tasks:not_a_class", "is not a task"),
        (
            "tests.harness.trainers.tasks:RaisesInInit",
            "__init__() of the task tests.harness.trainers.tasks:RaisesInInit raised KeyError",
        ),
        ("tests.harness.trainers.tasks:RaisesInBuild", "raised ValueError: width must be even"),
        ("tests.harness.trainers.tasks:BuildsNothing", "returned NoneType, not a TrainSpec"),
        ("tests.harness.trainers.tasks:SaysWhatToDo", "the corpus is empty"),
    ],
)
def test_a_task_that_cannot_be_built_says_why(name: str, reason: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Unknown, unimportable, incomplete or raising: the sentence names the task and the fault."""
    assert reason in failure_of(name).reason


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A task that does not look for its data itself still gives the path."""
    failure = failure_of("tests.harness.trainers.tasks:MissesData", str(tmp_path))

    assert str(tmp_path / "images.bin") in failure.reason
    assert "data_dir" in failure.hint


def test_a_task_beside_the_configuration_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules in the folder the node was started in import as with `python -m`."""
    (tmp_path / "my_own_task.py").write_text("from tests.harness.trainers.tasks import Plain\nclass Mine(Plain): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    assert load_task("my_own_task:Mine").__name__ == "Mine"


def test_devices() -> None:
    """ "auto" takes what is there; what is not there is refused with what is."""
    assert resolve_device("cpu") == "cpu"
    assert resolve_device("auto") == ("cuda:0" if torch.cuda.is_available() else "cpu")
    with pytest.raises(TrainerFailed, match=r'training.device = "cuda:99" is not available') as failure:
        resolve_device("cuda:99")
    assert failure.value.fatal
    assert "cpu" in failure.value.hint
    with pytest.raises(TrainerFailed, match="not available"):
        resolve_device("toaster")


# -- a checkpoint's vector as a file that plain PyTorch reads


def test_tensors_are_the_same_without_this_program(tmp_path: Path) -> None:
    """`torch.load(weights_only=True)` gives names, shapes, types and values of the safetensors file."""
    state = {"0.weight": torch.randn(3, 2), "0.bias": torch.zeros(3, dtype=torch.bfloat16)}
    save_file(state, tmp_path / "in.safetensors")

    convert(str(tmp_path / "in.safetensors"), str(tmp_path / "out.pt"))

    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
