"""The commands that query a node: what they print, and which change they request."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from p2pnode.commands import ask
from p2pnode.commands.options import WhichNode

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
