"""docs/terminal.md has every command with `--json`, and the keys that it prints."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from p2pnode import background
from p2pnode.cli import app, main
from p2pnode.client import RunningNode
from p2pnode.demo.plan import DemoPlan, DemoResult, summary
from p2pnode.doctor import machine
from tests.harness.project.repository import ROOT

PAGE = (ROOT / "docs" / "terminal.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (`[a-z ]+`(?:, `[a-z ]+`)*) \| (.+) \|$", re.MULTILINE)
KEY = ["--set", "swarm.key_file=state/swarm.key"]
NAME = re.compile(r"`([a-z_ ]+)`")


def keys_named() -> dict[str, list[str]]:
    """The keys of each command; those in brackets belong to what is inside."""
    return {
        command: NAME.findall(re.sub(r"\([^()]*\)", "", text))
        for names, text in ROW.findall(PAGE)
        for command in NAME.findall(names)
    }


def commands_with_json(command: Any, path: str = "") -> Iterator[str]:
    if any("--json" in option.opts for option in command.params):
        yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from commands_with_json(below, f"{path} {name}".strip())


def test_every_command_with_json_is_in_the_table_and_no_other() -> None:
    """Who adds the option adds a row."""
    assert sorted(commands_with_json(typer.main.get_command(app))) == sorted(keys_named())


@pytest.mark.parametrize(
    "arguments",
    [
        ["config", "show", "--origin"],
        ["config", "default"],
        ["config", "check"],
        ["init"],
        ["forget", "--force", "--state-dir", "state"],
        ["key", "new", "other"],
        ["key", "show", *KEY],
        ["key", "invite", *KEY, "--run", "digits", "--address", "10.0.0.5:8468"],
        ["key", "join", "invitation", "--state-dir", "joined"],
        ["key", "rotate", "prepare", *KEY],
        ["records", "pack", "lines.txt", "--out", "lines.recordio"],
        ["records", "index", "made.recordio"],
        ["records", "check", "made.recordio"],
        ["doctor", "--offline", "--set", "node.port=0", "--set", "status.port=0"],
        ["simulate", "--nodes", "4", "--duration", "2"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_a_command_prints_the_keys_of_its_row(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One object with its schema, and exactly these keys."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(machine, "torch_facts", lambda: {"missing": True})
    (tmp_path / "lines.txt").write_text("one\ntwo\n")
    if arguments[0] in ("key", "forget"):
        (tmp_path / "state").mkdir()
        (tmp_path / "state" / "identity.key").write_bytes(b"x")
        assert main(["key", "new", "state/swarm.key"]) == 0
        assert main(["key", "invite", *KEY, "--run", "digits", "--address", "10.0.0.5:1", "--out", "invitation"]) == 0
        capsys.readouterr()
    if arguments[0] == "records" and arguments[1] != "pack":
        assert main(["records", "pack", "lines.txt", "--out", "made.recordio"]) == 0
        capsys.readouterr()

    assert main([*arguments, "--json"]) == 0

    answer = json.loads(capsys.readouterr().out)
    names = keys_named()
    command = next(name for name in (" ".join(arguments[:2]), arguments[0]) if name in names)
    assert answer.pop("schema") == 1
    assert sorted(answer) == sorted(name for name in names[command] if not name.startswith("--"))


def test_an_invitation_in_a_file_is_not_printed_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its line has the swarm key: `key invite --json` prints it only where `key invite` prints it."""
    monkeypatch.chdir(tmp_path)
    assert main(["key", "new", "k"]) == 0
    capsys.readouterr()
    invite = ["key", "invite", "--set", "swarm.key_file=k", "--run", "digits", "--address", "10.0.0.5:1", "--json"]

    assert main(invite) == 0
    shown = json.loads(capsys.readouterr().out)
    assert main([*invite, "--out", "file"]) == 0
    written = json.loads(capsys.readouterr().out)

    assert (shown["file"], shown["invitation"]) == (None, (tmp_path / "file").read_text().strip())
    assert (written["file"], written["invitation"]) == ("file", None)


def test_a_node_in_the_background_prints_the_keys_of_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One object for all nodes that were started; a node in the foreground has none, and is not started."""
    started: list[background.Background] = []
    node = RunningNode("127.0.0.1:1", 1, "ab")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(background, "start", lambda request, _show: started.append(request) or [node, node])
    monkeypatch.setattr(background, "summary_of", lambda _: "it learns")

    for command in ["start"], ["run"]:
        program = ["--", "true"] if command == ["run"] else []
        assert main([*command, "--state-dir", "state", "--background", "--json", *program]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer.pop("schema") == 1
        assert sorted(answer) == sorted(keys_named()[command[0]])
        assert answer["nodes"] == [{"id": "ab", "pid": 1, "address": "127.0.0.1:1", "summary": "it learns"}] * 2
        assert answer["log"] == str(started[-1].log_folder / "node.log")

        assert main([*command, "--state-dir", "state", "--json", *program]) == 2
        output = capsys.readouterr()
        assert (output.out, "--background" in output.err) == ("", True)
    assert len(started) == 2


def test_the_rows_of_what_costs_too_much_to_run() -> None:
    """The demo's figures, and a node that `leave` has ended."""
    assert ["schema", *keys_named()["demo"]] == list(summary(DemoPlan(), DemoResult(True, "", 1.0, (), ()), []))
    node = RunningNode("127.0.0.1:1", 1, "ab")
    ended = background.Ended(node, 1.0, is_clean=True, left_behind={}).as_json
    (row,) = [text for names, text in ROW.findall(PAGE) if names == "`leave`, `stop`"]
    assert NAME.findall(row) == ["ended", *ended, "address", "accepted"]
