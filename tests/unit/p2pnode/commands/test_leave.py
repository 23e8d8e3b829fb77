"""`p2pnode leave`: what it says of each node that has ended, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2pnode import background, cli
from p2pnode.background import Ended
from p2pnode.errors import ExitCode

Output = pytest.CaptureFixture[str]
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
