"""Log records in reports: of tests that ask for them, and of those that fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.harness.project.repository import ROOT

MODULE = """
import logging
from _pytest import logging as capture
own = logging.getLogger("of.its.own")
own.propagate = False


def test_asks(caplog):
    own.warning("kept to itself")
    assert caplog.text.count("kept to itself") == 1


def test_fails():
    logging.getLogger("some").warning("said before it failed")
    assert 1 == 2


def test_finds_nothing_of_the_others(caplog):
    assert capture.catching_logs.__name__ == "catching_logs"
    assert caplog.records == []


def catching(logger):
    return [one for one in logger.handlers if isinstance(one, capture.LogCaptureHandler)]


def test_is_not_caught_at_every_logger():
    assert len(catching(logging.getLogger())) == 2
    assert catching(own) == []
"""


def test_records_are_in_reports_and_a_fixture_has_those_of_every_logger(tmp_path: Path) -> None:
    """A failed test's records are reported. `caplog` has those of loggers that pass nothing on; other tests do not look
    for them."""
    (tmp_path / "test_module.py").write_text(MODULE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    plugins = ["-p", "tests.harness.runner.quick_log_capture", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert "1 failed, 3 passed" in done.stdout
    assert "said before it failed" in done.stdout.partition("Captured log call")[2]
