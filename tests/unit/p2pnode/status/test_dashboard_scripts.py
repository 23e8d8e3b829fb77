"""The parts of the dashboard without a page, run by node's own test runner; it skips where there is no node."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "dashboard"


def test_the_scripts_of_the_dashboard_do_what_their_tests_say() -> None:
    """Formats, the parser of the stream, the series, the steps and the sentences."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    files = sorted(str(path) for path in FOLDER.glob("*.test.mjs"))
    assert len(files) >= 6

    done = subprocess.run([node, "--test", *files], capture_output=True, text=True, timeout=60, check=False)

    print(done.stdout)
    assert done.returncode == 0, done.stderr
