"""Bad input to a real process: one clear sentence, a hint, the documented exit code, and nothing half-written."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pnode.client import STATUS_FILE
from tests.harness.project.repository import ROOT
from tests.harness.runner.long_run import more
from tests.process.harness.forked_python import run_p2pnode, start_p2pnode

#: Seconds a refused start may take; importing torch on a loaded machine is most of it.
DEADLINE_S = 180.0
#: What a start may leave in its state directory although it was refused: whole files that the next start uses.
WHOLE = {"identity.key", "incarnation", "lock", "genesis", "trainer.log", "status.token"}


class Refused:
    """A finished process that was refused: its exit code, its sentence and its hint."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        lines = done.stderr.splitlines()
        assert "Traceback" not in done.stderr, done.stderr
        assert [line.partition(":")[0] for line in lines[-2:]] == ["error", "hint"], done.stderr
        assert sum(line.startswith("error:") for line in lines) == 1
        assert done.stdout == ""
        self.code = done.returncode
        self.error, self.hint = lines[-2], lines[-1]


def p2pnode(folder: Path, *arguments: str) -> Refused:
    """Run a command that must be refused, in a folder of its own and without settings of the caller."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("P2PNODE_")}
    environment["PYTHONPATH"] = str(ROOT)
    return Refused(run_p2pnode(arguments, cwd=folder, env=environment, timeout=DEADLINE_S))


def start(folder: Path, *arguments: str, verb: str = "start") -> Refused:
    """`p2pnode start` on free ports with a state directory under the test's folder."""
    ports = [] if "--port" in arguments else ["--port", "0"]
    ports += [] if "--status-port" in arguments else ["--status-port", "0"]
    state = [] if "--state-dir" in arguments else ["--state-dir", str(folder / "state")]
    refused = p2pnode(folder, verb, *ports, *state, "--set", "training.threads=1", *arguments)
    assert half_written(folder) == []
    return refused


def half_written(folder: Path) -> list[str]:
    """Files that a refused start should not have left: temporary ones, addresses of no node, half a checkpoint."""
    state = folder / "state"
    if not state.is_dir():
        return []
    return sorted(str(path) for path in state.rglob("*") if path.is_file() and path.name not in WHOLE)


@contextlib.contextmanager
def held(kind: socket.SocketKind) -> Iterator[int]:
    """A port of the loopback that another program holds."""
    with socket.socket(socket.AF_INET, kind) as holder:
        holder.bind(("127.0.0.1", 0))
        if kind == socket.SOCK_STREAM:
            holder.listen()
        yield holder.getsockname()[1]


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A server that is no p2pnode: it sends these bytes to every client and closes."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(65536)
                    connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_an_unknown_setting_starts_nothing(tmp_path: Path) -> None:
    """A misspelt key in the file: its line, the key, and the one that was meant; no state directory is made."""
    (tmp_path / "node.toml").write_text("[node]\nprot = 8468\n")

    refused = start(tmp_path)

    assert refused.code == 4
    assert "node.toml line 2: there is no setting node.prot" in refused.error
    assert "did you mean node.port?" in refused.hint
    assert not (tmp_path / "state").exists()


def test_an_impossible_value_starts_nothing(tmp_path: Path) -> None:
    """A value out of range: the key, the value and what is allowed; no state directory is made."""
    refused = start(tmp_path, "--set", "barrier.quantile=2")

    assert refused.code == 4
    assert "barrier.quantile = 2 is not allowed; it must be a number, greater than 0 and at most 1" in refused.error
    assert not (tmp_path / "state").exists()


def test_listening_beyond_this_machine_needs_consent(tmp_path: Path) -> None:
    """A swarm without a key is not opened to the network by accident."""
    refused = start(tmp_path, "--set", "node.host=0.0.0.0")

    assert refused.code == 4
    assert "swarm.allow_open = true" in refused.hint


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_port_in_use_is_named(kind: socket.SocketKind, tmp_path: Path) -> None:
    """Either half of the overlay's port is taken: exit code 6, the address, how to choose another, and no directory."""
    with held(kind) as port:
        refused = start(tmp_path, "--port", str(port))

    assert not (tmp_path / "state").exists()
    assert refused.code == 6
    assert f"127.0.0.1:{port}" in refused.error
    assert "--port" in refused.hint


def test_a_status_port_in_use_is_named(tmp_path: Path) -> None:
    """The HTTP API's port is taken: exit code 6, the address, and how to choose another."""
    with held(socket.SOCK_STREAM) as port:
        refused = start(tmp_path, "--status-port", str(port))

    assert refused.code == 6
    assert f"127.0.0.1:{port}: the port is in use" in refused.error
    assert "--status-port" in refused.hint


def test_a_state_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """A path that cannot be a folder: exit code 7, the path, and the file is left as it was."""
    (tmp_path / "state").write_text("precious")

    refused = start(tmp_path)

    assert refused.code == 7
    assert str(tmp_path / "state") in refused.error
    assert "--state-dir" in refused.hint
    assert (tmp_path / "state").read_text() == "precious"


def test_an_identity_that_cannot_be_read_is_refused_and_kept(tmp_path: Path) -> None:
    """Junk in identity.key is never replaced by a new identity: exit code 7, and the file stays."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "identity.key").write_bytes(b"junk")

    refused = start(tmp_path)

    assert refused.code == 7
    assert "identity.key" in refused.error or str(tmp_path / "state") in refused.error
    assert (tmp_path / "state" / "identity.key").read_bytes() == b"junk"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_state_directory_without_permission_is_refused(tmp_path: Path) -> None:
    """A folder that may not be written: exit code 7."""
    (tmp_path / "state").mkdir(mode=0o500)

    refused = start(tmp_path)

    assert refused.code == 7
    assert "ermission" in refused.error


def test_missing_data_is_named(tmp_path: Path) -> None:
    """A task without its files: exit code 8, the place that was looked at."""
    (tmp_path / "empty").write_text("")

    refused = start(tmp_path, "--task", "text", "--data-dir", str(tmp_path / "absent.txt"))

    assert refused.code == 8
    assert "absent.txt" in refused.error


@pytest.mark.parametrize(
    ("source", "task", "words"),
    [
        ("", "bad_task:Missing", ["Missing"]),
        *more(
            ("", "no_such_module_here:Task", ["no_such_module_here"]),
            ("import does_not_exist\n", "bad_task:Task", ["does_not_exist"]),
        ),
        (
            "class Task:\n    build = batches = loss = evaluate = print\n"
            "    def __init__(self, *a, **k):\n        raise RuntimeError('no luck')\n",
            "bad_task:Task",
            ["no luck"],
        ),
    ],
)
def test_a_task_that_cannot_be_made_is_explained(source: str, task: str, words: list[str], tmp_path: Path) -> None:
    """A task that does not import, is not there, or raises: exit code 8 with the reason itself."""
    (tmp_path / "bad_task.py").write_text(source)

    refused = start(tmp_path, "--task", task)

    assert refused.code == 8
    for word in words:
        assert word in refused.error


def test_a_program_that_crashes_at_start_is_reported_with_its_code(tmp_path: Path) -> None:
    """`p2pnode run` around a program that ends before it attaches: exit code 8, and how it ended."""
    refused = start(tmp_path, "--", sys.executable, "-c", "raise SystemExit(3)", verb="run")

    assert refused.code == 8
    assert "3" in refused.error


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    """`p2pnode run` around nothing: exit code 8 before anything else is made."""
    refused = start(tmp_path, "--", "no-such-program", verb="run")

    assert refused.code == 8
    assert "no-such-program" in refused.error
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"SSH-2.0-OpenSSH_9.9\r\n",
    ],
)
def test_a_bootstrap_that_is_no_p2pnode_is_refused(answer: bytes, tmp_path: Path) -> None:
    """The only bootstrap uses another protocol: exit code 5, its address, and no new swarm."""
    with answering(answer) as address:
        refused = start(tmp_path, "--bootstrap", address)

    assert refused.code == 5
    assert address in refused.error
    assert "swarm.bootstrap" in refused.hint
    assert not (tmp_path / "state" / "genesis").exists()


@pytest.mark.promise(20)
def test_two_nodes_on_one_state_directory_are_refused(tmp_path: Path) -> None:
    """A second node on a directory in use: exit code 7, and the first one continues."""
    state = str(tmp_path / "state")
    flags = ["--port", "0", "--status-port", "0", "--state-dir", state]
    task = ["--task", "tests.harness.trainers.tasks:Slow", "--set", "training.options={seconds = 0.1}"]
    first = start_p2pnode(["start", *flags, *task], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not (tmp_path / "state" / STATUS_FILE).exists():
            assert first.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        refused = p2pnode(tmp_path, "start", *flags)

        assert refused.code == 7
        assert "another node runs on the state directory" in refused.error
        assert first.poll() is None
        assert (tmp_path / "state" / STATUS_FILE).exists()
    finally:
        first.terminate()
        first.wait(DEADLINE_S)
    assert first.returncode == 0
    assert not (tmp_path / "state" / STATUS_FILE).exists()
