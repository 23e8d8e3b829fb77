"""Reasons why a trainer process ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from training.supervisor.process import OutputLog
from training.supervisor.session import hidden_package


def test_a_folder_on_the_path_that_hides_ours_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an installed program, where the user's PYTHONPATH comes first and Python finds his folder only."""
    (tmp_path / "training").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    output = OutputLog(tmp_path / "trainer.log")
    output.write(b"python: Error while finding module specification for 'training.trainer' ")
    output.write(b"(ModuleNotFoundError: No module named 'training.trainer')\n")
    asyncio.run(output.end())

    failure = hidden_package(output)

    assert failure is not None
    assert f"the folder {tmp_path / 'training'} hides p2pnode's own package" in failure[0]
    assert "rename" in failure[1]
