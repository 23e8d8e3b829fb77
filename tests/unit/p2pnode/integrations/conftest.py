"""Settings for the libraries: offline, and their own warnings are not ours to answer for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def in_two_nodes(tmp_path: Path) -> Callable[..., Any]:
    """Runs one script per node, each called with its number, for ten steps of three optimiser steps."""
    from tests.harness.swarms.script_swarm import train_together

    def run(*scripts: Callable[[], Any], steps: int = 10, **settings: Any) -> Any:
        named = {f"n{number}": script for number, script in enumerate(scripts)}
        return train_together(named, tmp_path, steps, **{"training.local_steps": 3, **settings})

    return run


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
