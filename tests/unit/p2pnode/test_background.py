"""Starting and ending a node in the background: the reason of a failed start, and how an end is seen."""

from __future__ import annotations

import fcntl
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pnode import background
from p2pnode.background import Background
from p2pnode.client import STATUS_FILE, find, status_file
from p2pnode.directory_lock import LOCK_FILE
from p2pnode.errors import ExitCode, UserError
from p2pnode.log_file import LOG_FILE

Show = Callable[[float, float, str, str], None]


def silent(_done: float, _total: float, _unit: str, _what: str) -> None:
    """Show nothing."""


def test_a_start_that_fails_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    """With the node's own message, hint and exit code; a directory that was not there is not there afterwards."""
    folder = tmp_path / "state"
    with pytest.raises(UserError, match=r"node\.port") as error:
        background.start(Background(["start", "--set", "node.port=66666"], folder), silent)
    assert error.value.exit_code == ExitCode.CONFIGURATION
    assert error.value.hint
    assert not folder.exists()


@pytest.mark.parametrize(
    ("log", "words", "hint"),
    [
        ('{"event": "a", "level": "info"}\nerror: the port is taken\nhint: another\n', "the port is taken", "another"),
        ('{"event": "trainer_failed", "level": "error", "reason": "no data"}\n', "trainer_failed: no data", "is in"),
        ("Traceback\nMemoryError\n", "MemoryError", "is in"),
        ("", "exit code 3", "is in"),
    ],
)
def test_the_reason_is_what_the_node_has_printed(tmp_path: Path, log: str, words: str, hint: str) -> None:
    """Its error, or else its last warning, or else its last lines; earlier starts in the same log are not searched."""
    before = "error: of yesterday\nhint: none\n"
    (tmp_path / LOG_FILE).write_text(before + log)
    error = background._ended(tmp_path, 3, len(before))
    assert words in error.message
    assert "yesterday" not in error.message
    assert hint in error.hint
    assert error.exit_code == 3
    assert (tmp_path / LOG_FILE).exists()


def test_a_disk_without_room_for_the_reason_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that could not write its log has said nothing; with space nothing is said of the disk."""
    (tmp_path / LOG_FILE).write_text("")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))
    error = background._ended(tmp_path, 1, 0)
    assert "is full" in error.message
    assert error.exit_code == ExitCode.STATE_DIRECTORY
    monkeypatch.undo()
    assert "is full" not in background._ended(tmp_path, 1, 0).message


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A file in its place stands for every reason."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be used") as error:
        background.start(Background(["start"], tmp_path / "file" / "state"), silent)
    assert error.value.exit_code == ExitCode.STATE_DIRECTORY


NODE = """
import fcntl, os, signal, sys, time
lock = open(sys.argv[1], "w"); fcntl.flock(lock, fcntl.LOCK_EX)
def leave(*_):
    if sys.argv[2] == "clean": os.unlink(sys.argv[3])
    if sys.argv[2] != "deaf": sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("up", flush=True)
while True: time.sleep(10)
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """A process that holds the lock as a node does, and ends cleanly, by a crash or not at all."""
    started: list[subprocess.Popen[bytes]] = []

    def start(how: str) -> subprocess.Popen[bytes]:
        arguments = [str(tmp_path / LOCK_FILE), how, str(tmp_path / STATUS_FILE)]
        process = subprocess.Popen([sys.executable, "-c", NODE, *arguments], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        (tmp_path / STATUS_FILE).write_bytes(status_file("127.0.0.1:1", process.pid, "ab" * 20))
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.parametrize(("how", "is_clean"), [("clean", True), ("crash", False)])
def test_stop_waits_and_tells_how_the_node_ended(
    tmp_path: Path, node: Callable[[str], Any], how: str, is_clean: bool
) -> None:
    """Without an API it sends the signal; a status file that is left over says that the node did not leave."""
    process = node(how)
    (ended,) = background.stop(tmp_path, 30, silent, now=False)
    assert process.poll() is not None or process.wait(60) == 0
    assert (ended.node.pid, ended.is_clean) == (process.pid, is_clean)


def test_stop_gives_up_after_its_time_and_now_kills(tmp_path: Path, node: Callable[[str], Any]) -> None:
    """The error says what to do; --now ends a process that takes no signal."""
    process = node("deaf")
    with pytest.raises(UserError, match="1 of 1 nodes have not left within 0 s: abababab does not answer") as error:
        background.stop(tmp_path, 0, silent, now=False)
    assert error.value.exit_code == ExitCode.STILL_LEAVING
    background.KILL_S, before = 0.0, background.KILL_S
    try:
        (ended,) = background.stop(tmp_path, 30, silent, now=True)
    finally:
        background.KILL_S = before
    assert process.wait(60) == -signal.SIGKILL
    assert not ended.is_clean
    assert find(tmp_path) is None


def test_stop_without_a_node_is_an_error_that_tells_which_case_it_is(tmp_path: Path) -> None:
    """None at all, one that has crashed, and one that has no API yet."""
    cases = []
    for prepare in ("none", "crashed", "starting"):
        if prepare == "crashed":
            (tmp_path / STATUS_FILE).write_bytes(status_file("127.0.0.1:1", 2**22 + 1, "ab" * 20))
        with (tmp_path / LOCK_FILE).open("w") as lock:
            if prepare == "starting":
                fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(UserError) as error:
                background.stop(tmp_path, 1, silent, now=False)
        assert error.value.exit_code == ExitCode.NOT_REACHABLE
        cases.append(error.value.message)
    assert "ended without leaving" not in cases[0]
    assert "has ended without leaving" in cases[1]
    assert "just starting" in cases[2]
