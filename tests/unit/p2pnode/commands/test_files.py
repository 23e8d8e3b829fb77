"""`p2pnode export` to PyTorch's own form; the conversion runs in a process of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from p2pnode import cli
from tests.harness.repository import ROOT


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory with one checkpoint; returns its vector file."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "state" / "checkpoints" / "step-0000000004"
    folder.mkdir(parents=True)
    save_file({"layer.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}, folder / "vector.safetensors")
    (folder / "state.json").write_text("{}")
    return folder / "vector.safetensors"


def test_pt_is_a_plain_state_dict(checkpoint: Path) -> None:
    """The file loads with weights_only, under the canonical names, with the values of the checkpoint."""
    torch = pytest.importorskip("torch")

    assert cli.main(["export", "model.pt", "--state-dir", "state"]) == 0

    state = torch.load("model.pt", weights_only=True)
    assert {name: value.tolist() for name, value in state.items()} == {"layer.weight": [[0, 1, 2], [3, 4, 5]]}


def test_a_damaged_checkpoint_leaves_no_file(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A conversion that fails says why, with exit code 8, and leaves nothing half-written."""
    checkpoint.write_bytes(b"damaged")

    assert cli.main(["export", "model.pt", "--state-dir", "state"]) == 8

    assert "could not be converted" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
