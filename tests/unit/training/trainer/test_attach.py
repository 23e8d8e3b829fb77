"""`attach` without a daemon. Scripts under a daemon are in tests/process/test_attached_swarm.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from p2pnode.training.errors import TrainingError
from p2pnode.training.trainer import standalone
from p2pnode.training.trainer.attach import NotAttached, attach
from p2pnode.training.trainer.joining import refuse_ranks
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.interface import TrainerFailed
from p2pnode.training.trainer_link.messages import Start
from tests.harness.project.repository import ROOT


def optimized() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_attach_outside_of_a_node_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the daemon's variable; the error is a RuntimeError for scripts, and a TrainingError for us."""
    monkeypatch.delenv(messages.SOCKET_VARIABLE, raising=False)

    with pytest.raises(NotAttached, match="p2pnode run -- python") as failure:
        attach(*optimized())
    assert isinstance(failure.value, RuntimeError)
    assert isinstance(failure.value, TrainingError)


def test_a_socket_without_a_daemon_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The message has the path, the system's reason, and the case of torchrun."""
    monkeypatch.setenv(messages.SOCKET_VARIABLE, os.fspath(tmp_path / "link"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    with pytest.raises(NotAttached, match=r"no p2pnode daemon listens at .*link \(No such file.*init_process_group"):
        attach(*optimized())


def test_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under torchrun each rank would otherwise try to be the trainer."""
    monkeypatch.setenv(messages.SOCKET_VARIABLE, os.fspath(tmp_path / "link"))
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(NotAttached, match="init_process_group"):
        attach(*optimized())


# -- what a trainer refuses before it describes its model


@pytest.mark.parametrize(("devices", "ranks", "refused"), [(1, 2, False), (2, 1, False), (2, 2, True)])
def test_a_script_with_ranks_of_its_own_has_one_device_of_its_node(devices: int, ranks: int, refused: bool) -> None:
    """Two ways to use several GPUs at once are refused for good."""
    start = Start("t", "", {}, "cpu", 1, 0, 0, 4, device_count=devices)
    if not refused:
        refuse_ranks(start, ranks)
        return
    with pytest.raises(TrainerFailed, match="ranks of its own") as failed:
        refuse_ranks(start, ranks)
    assert failed.value.fatal


# -- `python -m training.trainer.standalone`


def test_alone_prints_one_json_object() -> None:
    """`python -m training.trainer.standalone --json`: what the demo shows beside the swarm."""
    options = json.dumps({"part": 1, "parts": 4, "lacking": 3})
    command = [sys.executable, "-m", "p2pnode.training.trainer.standalone", "--task", "digits", "--options", options]

    done = subprocess.run(
        [*command, "--steps", "20", "--threads", "1", "--json"], capture_output=True, text=True, cwd=ROOT, check=True
    )

    assert 0.5 < json.loads(done.stdout)["accuracy"] < 0.75
    assert done.stderr == ""


def test_alone_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 8 and one sentence."""
    monkeypatch.setattr(standalone, "import_later", lambda: None)  # the compiler of this process stays as it is
    monkeypatch.setattr(sys, "argv", ["standalone", "--task", "text"])

    assert standalone.main() == 8
    error = capsys.readouterr().err
    assert "training.data_dir is empty" in error
    assert "Traceback" not in error
