"""The commands that query a node: what they print, and which change they request."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2pnode import background, cli
from p2pnode.background import Ended
from p2pnode.commands import ask
from p2pnode.commands.options import WhichNode
from p2pnode.errors import ExitCode

STATUS: dict[str, Any] = {"schema": 1, "summary": "training at step 7", "state": "training", "step": 7}
PEER = {"id": "ab" * 20, "address": "10.0.0.2:8468", "state": "training", "step": 6, "lag": 1}

Output = pytest.CaptureFixture[str]


class Client:
    """In the place of `NodeClient`."""

    address = "127.0.0.1:8080"

    def __init__(self) -> None:
        self.posted: list[str] = []
        self.listed: list[dict[str, Any]] = [PEER]

    def status(self) -> dict[str, Any]:
        return STATUS

    def peers(self) -> list[dict[str, Any]]:
        return self.listed

    def post(self, path: str) -> None:
        self.posted.append(path)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    made = Client()
    monkeypatch.setattr(WhichNode, "client", lambda _: made)
    return made


def test_status_prints_sentences_or_the_whole_answer(client: Client, capsys: Output) -> None:
    """The first line is the node's summary; --json is what the node sent."""
    assert ask.status() == 0
    assert capsys.readouterr().out.splitlines()[0] == "● training at step 7"
    assert ask.status(as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == STATUS


def test_peers_prints_one_line_each(client: Client, capsys: Output) -> None:
    """With a header, as JSON under a schema number, and a sentence without peers."""
    assert ask.peers() == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "id"
    assert line.startswith("abababab  10.0.0.2:8468")
    assert ask.peers(as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "peers": [PEER]}
    client.listed = []
    assert ask.peers() == 0
    assert capsys.readouterr().out == "this node knows no peers\n"


@pytest.mark.parametrize(
    ("command", "name", "words"),
    [
        (ask.leave, "leave", "is leaving"),
        (ask.pause, "pause", "pauses"),
        (ask.resume, "resume", "trains again"),
    ],
)
def test_a_change_is_requested_and_named(
    command: Callable[..., int], name: str, words: str, client: Client, capsys: Output
) -> None:
    """One request, and a line with the node's address, or an object for scripts."""
    assert command(address=client.address) == 0
    assert client.posted == [f"/{name}"]
    assert f"the node at 127.0.0.1:8080 {words}" in capsys.readouterr().out
    assert command(address=client.address, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "address": client.address, "accepted": name}


NODE: Any = SimpleNamespace(node_id="ab" * 20, pid=77)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Ended]:
    """What has ended when the nodes are asked to; whether at once is the last argument."""
    monkeypatch.chdir(tmp_path)
    found: list[Ended] = []

    def stop(folder: Path, timeout_s: float, show: Any, *, now: bool) -> list[Ended]:
        if timeout_s == 13.0:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(background, "stop", stop)
    return found


def leave(*arguments: str, name: str = "leave") -> int:
    return cli.main([name, "--state-dir", "state", *arguments])


def test_a_node_that_has_left_is_said_so(ended: list[Ended], capsys: Output) -> None:
    """With its process and its time; what nobody took over is a notice."""
    ended.append(Ended(NODE, 2.34, is_clean=True, left_behind={"shards": 3}))

    assert leave() == 0
    said = capsys.readouterr()
    assert said.out == "abababab has left (process 77, after 2.3 s)\n"
    assert "nobody took over in time: shards 3" in said.err


def test_a_node_that_ended_without_leaving_is_a_failure(ended: list[Ended], capsys: Output) -> None:
    """Unless it was asked for; of several nodes one is enough."""
    ended += [Ended(NODE, 1.0, is_clean=True, left_behind={}), Ended(NODE, 1.0, is_clean=False, left_behind={})]

    assert leave() == ExitCode.UNEXPECTED
    said = capsys.readouterr()
    assert "ended without leaving (process 77" in said.out
    assert "p2pnode logs" in said.err
    assert leave("--now") == 0
    assert capsys.readouterr().out.count("was ended (process 77") == 2


def test_a_program_gets_one_object(ended: list[Ended], capsys: Output) -> None:
    """And nothing else on standard output."""
    ended.append(Ended(NODE, 2.3456, is_clean=True, left_behind={"shards": 3}))

    assert leave("--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "schema": 1,
        "ended": [{"id": "ab" * 20, "pid": 77, "seconds": 2.346, "clean": True, "left_behind": {"shards": 3}}],
    }


def test_an_interrupted_wait_leaves_the_node_leaving(ended: list[Ended], capsys: Output) -> None:
    """It is told how to see the end of it."""
    assert leave("--timeout", "13") != 0
    assert "goes on leaving; `p2pnode status` shows" in capsys.readouterr().err


def test_stop_is_another_name_and_an_api_is_not_ended_at_once(ended: list[Ended], capsys: Output) -> None:
    """`--now` signals a process of this machine."""
    ended.append(Ended(NODE, 2.34, is_clean=True, left_behind={}))

    assert leave(name="stop") == 0
    assert "has left" in capsys.readouterr().out
    assert leave("--now", "--address", "127.0.0.1:8080") == ExitCode.USAGE
