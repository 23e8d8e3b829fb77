"""The environment of a trainer process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness.repository import ROOT
from tests.process.harness.trainer_world import World
from training.supervisor.process_trainer import KEEP_MEMORY


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(ROOT)  # Where `tests.harness.tasks` is found.
    return World(tmp_path / "state")


@pytest.mark.parametrize("users", ["", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_a_trainer_keeps_its_memory_unless_the_user_decides(
    world: World, monkeypatch: pytest.MonkeyPatch, users: str
) -> None:
    """The C library keeps freed pages, unless the user's environment configures malloc."""
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    if users:
        monkeypatch.setenv(users, "2")

    environment = world.trainer()._environment()

    assert (KEEP_MEMORY.items() <= environment.items()) is not bool(users)
    assert not users or environment[users] == "2"
