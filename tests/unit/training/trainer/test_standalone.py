"""`python -m training.trainer.standalone`: its output and its errors."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from p2pnode.training.trainer import standalone
from tests.harness.project.repository import ROOT


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
