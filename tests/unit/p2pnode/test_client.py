"""Finding a node on this machine, and what the client makes of answers."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pnode import cli
from p2pnode.client import STATUS_FILE, NodeClient, NotReachable, find, running_on, status_file
from p2pnode.directory_lock import LOCK_FILE, locked
from p2pnode.errors import UserError

pytestmark = pytest.mark.usefixtures("own_folder")


def run(*arguments: str) -> int:
    return cli.main(list(arguments))


def test_a_node_is_found_by_its_state_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """status.json leads to the node; one left behind by an ended process is reported as such."""
    folder = tmp_path / "state"
    folder.mkdir()
    assert find(folder) is None
    (folder / STATUS_FILE).write_bytes(b'{"address": "127.0.0.1:1"')
    assert find(folder) is None
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    (folder / STATUS_FILE).write_bytes(status_file("127.0.0.1:1", child.pid, "ab"))

    found = find(folder)

    assert found == ("127.0.0.1:1", child.pid, "ab", "", folder)
    assert not found.alive
    assert run("status") == 9
    assert f"its process {child.pid} has ended" in capsys.readouterr().err


def test_a_process_with_the_number_of_an_ended_node_is_no_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system gives numbers again: a node holds the lock of its directory."""
    folder = tmp_path / "state"
    with locked(folder):
        (folder / STATUS_FILE).write_bytes(status_file("127.0.0.1:1", os.getpid(), "ab"))
        found = find(folder)
        assert found is not None
        assert found.alive
        assert running_on(folder) == {folder: found}

    assert not found.alive
    assert running_on(folder) == {}
    assert run("status") == 9
    assert f"its process {os.getpid()} has ended" in capsys.readouterr().err


def test_a_killed_process_that_nobody_has_waited_for_is_no_node(tmp_path: Path) -> None:
    """A zombie is in the table of processes still, and holds no lock."""
    folder = tmp_path / "state"
    folder.mkdir()
    code = "import fcntl, sys; lock = open(sys.argv[1], 'w'); fcntl.flock(lock, fcntl.LOCK_EX); print(); input()"
    command = [sys.executable, "-c", code, str(folder / LOCK_FILE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as node:
        assert node.stdout is not None
        assert node.stdout.readline() == b"\n"
        (folder / STATUS_FILE).write_bytes(status_file("127.0.0.1:1", node.pid, "ab"))
        found = find(folder)
        assert found is not None
        assert found.alive

        node.kill()
        os.waitid(os.P_PID, node.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
        assert not found.alive


class _Api(http.server.BaseHTTPRequestHandler):
    """Refuses changes, answers `/status` as a node, and everything else as another program."""

    def do_GET(self) -> None:
        self._answer(200, {"schema": 1}, is_node=self.path == "/status")

    def do_POST(self) -> None:
        self._answer(401, {"error": "a token is needed", "hint": "send it"}, is_node=True)

    def _answer(self, status: int, answer: object, *, is_node: bool) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if is_node:
            self.send_header("X-P2PNode-Schema", "1")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Print nothing."""


@pytest.fixture
def api() -> Iterator[str]:
    """The address of a server that answers as `_Api`."""
    with http.server.HTTPServer(("127.0.0.1", 0), _Api) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_refusal_has_the_node_s_message_and_a_hint(api: str) -> None:
    """The node's own error is shown; without a token the hint names the options that give one."""
    with pytest.raises(UserError, match="a token is needed") as refused:
        NodeClient(api).post("/leave")

    assert "--token-file" in refused.value.hint


def test_an_answer_without_the_schema_header_is_not_a_node(api: str) -> None:
    """Another program that answers with JSON is recognised."""
    assert NodeClient(api).status() == {"schema": 1}
    with pytest.raises(NotReachable, match="is not a p2pnode"):
        NodeClient(api).peers()
