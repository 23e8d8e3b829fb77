"""A folder of its own for commands that are run in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.project.repository import ROOT


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No node.toml of the repository and no variable of the caller reaches these tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("P2PNODE_NODE__PORT", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("P2PNODE_STATUS__PORT", "1")
    monkeypatch.setenv("P2PNODE_NODE__STATE_DIR", str(tmp_path / "state"))
