"""The command and the environment of a trainer process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from p2pnode.training.settings import TrainingSettings
from p2pnode.training.supervisor.launch import KEEP_MEMORY, NodeStart, environment_of, start_message
from tests.harness.project.repository import ROOT


@pytest.mark.parametrize("users", ["", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_a_trainer_keeps_its_memory_unless_the_user_decides(monkeypatch: pytest.MonkeyPatch, users: str) -> None:
    """The C library keeps freed pages, unless the user's environment configures malloc."""
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    if users:
        monkeypatch.setenv(users, "2")

    environment = environment_of(TrainingSettings(), is_script=False)

    assert (KEEP_MEMORY.items() <= environment.items()) is not bool(users)
    assert not users or environment[users] == "2"


def test_a_script_has_its_own_python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task class finds this checkout; a user's own command finds what the user has set."""
    monkeypatch.setenv("PYTHONPATH", "users")

    task, script = (environment_of(TrainingSettings(), is_script=is_script) for is_script in (False, True))

    assert task["PYTHONPATH"] == f"{ROOT}{os.pathsep}users"
    assert script["PYTHONPATH"] == "users"


NODE = NodeStart(b"n" * 20, 3)


def test_a_folder_of_data_is_absolute_and_none_stays_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The trainer runs in another folder than the daemon; `~` is that of the user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")

    def folder(data_dir: str) -> str:
        return start_message(TrainingSettings(data_dir=data_dir), NODE, 1).data_dir

    assert [folder(given) for given in ("", "data", "/data", "~/data")] == [
        "",
        str(tmp_path / "data"),
        "/data",
        "/home/somebody/data",
    ]


def test_seeds_differ_by_node_device_and_start() -> None:
    """The node's seed stays over its starts, that of a start does not; the run's is that of the settings."""
    settings = TrainingSettings(seed=5)
    first, again = start_message(settings, NODE, 1), start_message(settings, NODE, 2)
    others = [
        start_message(settings, NODE._replace(device=1, devices=2), 1),
        start_message(settings, NODE._replace(node_id=b"m" * 20), 1),
    ]
    later = start_message(settings, NODE._replace(incarnation=4), 1)

    assert {one.seed for one in (first, again, later, *others)} == {5}
    assert first.node_seed == again.node_seed == later.node_seed
    assert len({one.node_seed for one in (first, *others)}) == 3
    assert len({one.start_seed for one in (first, again, later, *others)}) == 5
    assert (others[0].device_index, others[0].device_count) == (1, 2)
