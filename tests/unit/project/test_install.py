"""The bar of `make venv`: what pip's lines mean, and that its errors and exit code are kept."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from p2pnode import screen
from tests.harness.project.repository import ROOT
from tools import install

STUB = """
import pathlib, sys, tempfile, time
packages, gone = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
arguments = sys.argv[3:]
if "-qq" in arguments:
    print(" ".join(arguments))
    sys.exit(3)

def until(test):
    end = time.monotonic() + 60
    while not gone.exists() or test not in gone.read_text():
        if time.monotonic() > end:
            sys.exit(f"{test} is not shown")
        time.sleep(0.005)

print("Collecting torch")
print("  Downloading https://mirror/torch-2.9.1-cp311-none-any.whl (4.0 MB)")
place = pathlib.Path(tempfile.mkdtemp(), "torch-2.9.1-cp311-none-any.whl")
place.write_bytes(bytes(1_000_000))
until("download torch-2.9.1 1000000.0 of 4000000.0")
place.write_bytes(bytes(3_000_000))
until("download torch-2.9.1 3000000.0 of 4000000.0")
print("Installing collected packages: torch, six")
until("install 0 of 2")
(packages / "torch-2.9.1.dist-info").mkdir()
until("install 1 of 2")
sys.stderr.write("WARNING: a detail\\nERROR: what is wrong\\n")
sys.exit(int(arguments[0]))
"""


class Terminal(io.StringIO):
    """A terminal of 80 cells."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("code", [0, 2])
def test_a_terminal_shows_bytes_and_packages_as_they_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Downloads count bytes of pip's own file, the installation packages that are new. Errors are shown, warnings only
    with a failure, and the exit code is pip's."""
    (tmp_path / "stub.py").write_text(STUB)
    packages, shown = tmp_path / "packages", tmp_path / "shown"
    (packages / "pip-25.dist-info").mkdir(parents=True)
    monkeypatch.setenv("TERM", "xterm")
    seen: list[str] = []

    class Bar(screen.ProgressBar):
        def show(self, done: float, total: float = 1.0, unit: str = "%", what: str | None = None) -> None:
            seen.append(f"{what} {float(done) if unit == 'bytes' else done} of {total}")
            shown.write_text("\n".join(seen))
            super().show(done, total, unit, what)

    monkeypatch.setattr(screen, "ProgressBar", Bar)
    monkeypatch.setattr(install, "LOOK_S", 0.01)
    terminal = Terminal()
    pip = [sys.executable, str(tmp_path / "stub.py"), str(packages), str(shown)]
    assert install.install([str(code)], terminal, pip, packages) == code
    assert ("WARNING: a detail\n" in terminal.getvalue()) == (code != 0)
    assert terminal.getvalue().endswith("ERROR: what is wrong\n")


def test_without_a_terminal_it_is_plain_pip(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One `-qq` run with the same arguments, its output untouched."""
    (tmp_path / "stub.py").write_text(STUB)
    pip = [sys.executable, str(tmp_path / "stub.py"), "", ""]
    assert install.install(["-e", ".[torch,dev]"], io.StringIO(), pip) == 3
    assert capfd.readouterr().out == "-qq -e .[torch,dev]\n"


def test_it_runs_before_anything_is_installed() -> None:
    """With the standard library alone, in a new environment; pip's own exit code for a package that does not exist."""
    done = subprocess.run(
        [sys.executable, "-E", "-S", "-c", "import tools.install"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
