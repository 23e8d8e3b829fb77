"""The audit of the pins: what a report of pip-audit means, and that nothing asked is never a pass in disguise."""

from __future__ import annotations

import http.server
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools import audit

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
    """An advisory fails and names package, advisory and remedy; what could not be audited is reported."""
    verdict = audit.judge({"dependencies": entries})

    assert verdict.exit_code == exit_code
    assert all(word in "\n".join(verdict.lines) for word in words)


@pytest.mark.parametrize("failure", ["silence", "no report"])
def test_no_database_is_a_skip_with_its_reason(
    failure: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a network the check passes, and reports that nothing was audited."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if failure == "silence":
            raise subprocess.TimeoutExpired(command, 1)
        return subprocess.CompletedProcess(command, 1, "", "ERROR: Could not connect to PyPI's vulnerability feed\n")

    monkeypatch.setattr(subprocess, "run", run)

    assert audit.main() == 0
    said = capsys.readouterr().out
    assert "audit skipped" in said
    assert ("did not answer" if failure == "silence" else "Could not connect") in said


class Osv(http.server.BaseHTTPRequestHandler):
    """An advisory database that knows one advisory of one package, in the form of osv.dev."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ill = asked["package"]["name"].lower() == "structlog"
        advisory = {
            "id": "PYSEC-2026-1",
            "summary": "a made-up fault",
            "aliases": [],
            "affected": [
                {
                    "package": {"name": "structlog", "ecosystem": "PyPI"},
                    "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.0"}]}],
                }
            ],
        }
        body = json.dumps({"vulns": [advisory]} if ill else {}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def osv() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Osv) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/query"
        server.shutdown()
        thread.join()


@pytest.mark.long  # `make check` runs the tool as well
@pytest.mark.parametrize(("pins", "exit_code"), [("structlog==26.1.0\nnumpy==2.4.6\n", 1), ("numpy==2.4.6\n", 0)])
def test_the_real_tool_with_a_database_that_knows_an_advisory(
    osv: str,
    pins: str,
    exit_code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """pip-audit itself asks a database on the loopback. A known advisory of a pin fails the check and is named. Without
    one it passes, with the number of pins audited."""
    file = tmp_path / "constraints.txt"
    file.write_text(pins, encoding="utf-8")
    monkeypatch.setattr(audit, "PINS", file)
    real = subprocess.run

    def run(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        return real([*command, "--vulnerability-service", "osv", "--osv-url", osv], **settings)

    monkeypatch.setattr(subprocess, "run", run)

    assert audit.main() == exit_code
    said = capsys.readouterr().out
    assert "audited" in said, said
    assert ("structlog 26.1.0: PYSEC-2026-1, mended in 99.0" in said) == bool(exit_code)
