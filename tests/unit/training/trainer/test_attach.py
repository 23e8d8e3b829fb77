"""`attach` without a daemon. Scripts under a daemon are in tests/process/test_attached_swarm.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from p2pnode.training.errors import TrainingError
from p2pnode.training.trainer.attach import NotAttached, attach
from p2pnode.training.trainer_link import messages


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
