"""The audit of the pins: what a report of pip-audit means, and that nothing asked is never a pass in disguise."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def audit() -> ModuleType:
    found = importlib.util.spec_from_file_location("project_audit", ROOT / ".ci" / "audit.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


SOUND = {"name": "numpy", "version": "2.4.6", "vulns": []}
ILL = {"name": "aiohttp", "version": "1.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1", "2.0"]}]}
HOPELESS = {"name": "old", "version": "0.1", "vulns": [{"id": "PYSEC-2", "fix_versions": []}]}
UNKNOWN = {"name": "torch", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("entries", "exit_code", "words"),
    [
        ([SOUND, UNKNOWN], 0, ["audited 1 pins, 0 known", "not in the database: torch"]),
        ([SOUND, ILL], 1, ["aiohttp 1.0: PYSEC-1, mended in 1.1, 2.0"]),
        ([HOPELESS], 1, ["old 0.1: PYSEC-2, no release mends it"]),
        ([UNKNOWN], 0, ["audit skipped"]),
        ([], 0, ["audit skipped"]),
    ],
)
def test_a_report_is_judged(entries: list[dict[str, Any]], exit_code: int, words: list[str]) -> None:
    """An advisory fails and names package, advisory and remedy; what nobody could be asked about is said."""
    verdict = audit().judge({"dependencies": entries})

    assert verdict.exit_code == exit_code
    assert all(word in "\n".join(verdict.lines) for word in words)


@pytest.mark.parametrize("failure", ["silence", "no report"])
def test_no_database_is_a_skip_with_its_reason(
    failure: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine without a network passes the check, and is told that nothing was audited."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if failure == "silence":
            raise subprocess.TimeoutExpired(command, 1)
        return subprocess.CompletedProcess(command, 1, "", "ERROR: Could not connect to PyPI's vulnerability feed\n")

    monkeypatch.setattr(subprocess, "run", run)

    assert audit().main() == 0
    said = capsys.readouterr().out
    assert "audit skipped" in said
    assert ("did not answer" if failure == "silence" else "Could not connect") in said


def test_make_check_runs_the_audit() -> None:
    """The check that CI runs includes it, and its tool is pinned."""
    assert "$(BIN)/python .ci/audit.py" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "\npip_audit==" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
