"""Tests in forks of the process that has collected them: reports, fixtures, crashes and the end at a first failure."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.project.repository import ROOT
from tests.process.harness.trainer_world import is_running, wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forks on Linux alone")

#: A loaded machine takes long to start Python.
LIMIT_S = 100.0

MODULE = """
import atexit, multiprocessing, os, signal, sys, time, warnings
from pathlib import Path
import pytest

COLLECTED_BY = os.getpid()
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def shared():
    with (HERE / "setups").open("a") as file:
        file.write(f"{os.getpid()} ")
    yield os.getpid()
    with (HERE / "teardowns").open("a") as file:
        file.write(f"{os.getpid()} ")


@pytest.mark.worker_group("one")
@pytest.mark.parametrize("number", range(4))
def test_shares(shared, number, tmp_path, capsys):
    print("x")
    assert shared == os.getpid() != COLLECTED_BY == os.getppid()
    assert capsys.readouterr().out == "x\\n"
    assert list(tmp_path.iterdir()) == []


def meet(name, other):
    (HERE / name).touch()
    while not (HERE / other).exists():
        time.sleep(0.01)


def test_meets_right():
    meet("left", "right")


def test_meets_left():
    meet("right", "left")


def test_fails():
    print("printed")
    assert 1 == 2


@pytest.mark.skip(reason="why not")
def test_skips():
    pass


def test_warns():
    warnings.warn("a warning")


@pytest.fixture
def broken():
    yield
    raise ValueError("at its end")


def test_of_a_broken_fixture(broken):
    pass


@pytest.mark.worker_group("crash")
def test_before():
    pass


@pytest.mark.worker_group("crash")
def test_crashes():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.worker_group("crash")
def test_after():
    pass


@pytest.mark.timeout(1)
def test_hangs():
    (HERE / "hangs").write_text(str(os.getpid()))
    time.sleep(600 if "WAIT" in os.environ else 0)


def test_leaves_a_child():
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    child.start()
    atexit.register(child.join)  # as one that waits for the other end of a pipe


def test_waits(shared):
    (HERE / "waits").touch()
    time.sleep(600 if "WAIT" in os.environ and "LIMIT" not in os.environ else 0)
"""


@contextlib.contextmanager
def start(folder: Path, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Killed at the end: what a test that fails has left would fail others that find it."""
    (folder / "test_module.py").write_text(MODULE)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  worker_group: shared\n  timeout: shared\n")
    plugins = ["-p", "tests.harness.runner.forked_workers", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugins, "-rA"]
    with subprocess.Popen(
        [*command, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell that runs the tests in the background has SIGINT ignored, and programs inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def finished(folder: Path, *arguments: str, **environment: str) -> str:
    """What it printed."""
    with start(folder, *arguments, **environment) as running:
        return running.communicate(timeout=LIMIT_S)[0]


def test_a_run_reports_as_one_process_would(tmp_path: Path) -> None:
    """Two tests that wait for each other run at once. Module fixtures are made once per worker that needs them.
    What a test prints, a warning, a skip and an error at the end are reported. A crash fails the test that ran, and the
    rest of its unit runs elsewhere. A child that a test has left does not keep its worker."""
    output = finished(tmp_path, "--workers", "2")

    assert "2 failed, 13 passed, 1 skipped, 1 warning, 1 error" in output
    assert "printed" in output
    assert "a warning" in output
    assert "why not" in output
    assert "ValueError: at its end" in output
    assert "ended with SIGKILL while it ran this test" in output
    assert "PASSED test_module.py::test_after" in output
    made = (tmp_path / "setups").read_text().split()
    assert len(made) == len(set(made)) <= 3
    ended = (tmp_path / "teardowns").read_text().split()
    assert len(set(made) - set(ended)) <= 1  # a worker that is killed ends nothing
    assert len(ended) == len(set(ended))


def test_the_first_failure_ends_the_run_where_that_is_asked_for(tmp_path: Path) -> None:
    """With -x a test that waits in another worker is interrupted, and its fixture ends."""
    names = "fails or waits"
    output = finished(tmp_path, "--workers", "2", "-x", "-k", names, WAIT="1")

    assert "stopping after 1 failures" in output
    assert "1 failed" in output
    if (tmp_path / "waits").exists():
        assert (tmp_path / "setups").read_text() == (tmp_path / "teardowns").read_text()


def test_an_interrupt_ends_the_workers_and_their_fixtures(tmp_path: Path) -> None:
    """Ctrl-C in the controller alone: the worker ends its fixtures before the run does."""
    with start(tmp_path, "--workers", "2", "-k", "waits", WAIT="1") as running:
        assert wait_until((tmp_path / "waits").exists, LIMIT_S)
        running.send_signal(signal.SIGINT)
        output = running.communicate(timeout=LIMIT_S)[0]

    assert "KeyboardInterrupt" in output
    assert running.returncode == 2
    assert (tmp_path / "setups").read_text() == (tmp_path / "teardowns").read_text()


def test_a_test_that_goes_on_after_its_limit_fails_and_the_others_run(tmp_path: Path) -> None:
    """Nothing raises in it: the worker is killed, and another one takes what waits."""
    arguments = ("--workers", "1", "--worker-grace", "0.5", "-k", "hangs or waits")
    output = finished(tmp_path, *arguments, WAIT="1", LIMIT="1")

    assert "1 failed, 1 passed" in output
    assert "ended with SIGKILL while it ran this test" in output


def test_workers_die_with_the_process_that_has_collected(tmp_path: Path) -> None:
    """A kill leaves no worker behind, not one that waits in a test."""
    named = tmp_path / "hangs"
    with start(tmp_path, "--workers", "1", "-k", "hangs", WAIT="1") as running:
        assert wait_until(lambda: named.exists() and bool(named.read_text()), LIMIT_S)
        worker = int(named.read_text())
        running.kill()

    assert wait_until(lambda: not is_running(worker), LIMIT_S)
