"""`p2pnode forget`: what it shows, what it removes, and what it leaves."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from p2pnode import cli
from p2pnode.config.directory_record import RECORD_FILE, DirectoryRecord, encode
from p2pnode.directory_lock import locked
from p2pnode.errors import ExitCode

Output = pytest.CaptureFixture[str]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory of run digits, with an exported model in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    place = tmp_path / "state"
    (place / "checkpoints" / "00000001-step-0000000004").mkdir(parents=True)
    (place / "checkpoints" / "00000001-step-0000000004" / "vector.safetensors").write_bytes(b"x" * 2_000_000)
    (place / RECORD_FILE).write_bytes(encode(DirectoryRecord(run="digits")))
    for name in ("identity.key", "incarnation", "peers.json.tmp", "lock", "model.safetensors"):
        (place / name).write_bytes(b"x")
    return place


def forget(*arguments: str) -> int:
    return cli.main(["forget", "--state-dir", "state", *arguments])


def test_forced_it_removes_what_the_node_wrote_and_nothing_else(folder: Path, capsys: Output) -> None:
    """Each part is shown with its size; an exported model stays."""
    assert forget("--force") == 0
    shown = capsys.readouterr().out
    assert "of run digits" in shown
    assert "2.00 MB  the model, the optimiser" in shown
    assert "this stays: model.safetensors" in shown
    assert [path.name for path in folder.rglob("*")] == ["model.safetensors"]


def test_json_is_one_object_and_the_question_shows_what_goes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """At a terminal the list of what goes is beside the question, on standard error; a refusal prints no object."""
    monkeypatch.setattr("sys.stdin", Terminal("no\n"))
    assert forget("--json") == ExitCode.USAGE
    refused = capsys.readouterr()
    assert (refused.out, "2.00 MB" in refused.err) == ("", True)

    monkeypatch.setattr("sys.stdin", Terminal("digits\n"))
    assert forget("--json") == 0
    (gone,) = json.loads(capsys.readouterr().out)["directories"]
    assert (gone["path"], gone["run"], gone["stays"]) == ("state", "digits", ["model.safetensors"])
    assert gone["removed"]["checkpoints"] == 2_000_000


def test_an_empty_directory_goes_too(folder: Path) -> None:
    """Without anything else in it the directory itself is removed, and the nodes below local/ with it."""
    (folder / "model.safetensors").unlink()
    (folder / "local" / "2").mkdir(parents=True)
    (folder / "local" / "2" / "identity.key").write_bytes(b"x")
    (folder / "local" / "lock").touch()

    assert forget("--force") == 0
    assert not folder.exists()


@pytest.mark.parametrize(("typed", "code"), [("digits\n", 0), ("y\n", ExitCode.USAGE), ("", ExitCode.USAGE)])
def test_a_person_agrees_by_the_name_of_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, typed: str, code: int
) -> None:
    """At a terminal the run's name is asked for; anything else removes nothing."""
    monkeypatch.setattr("sys.stdin", Terminal(typed))

    assert forget() == code
    assert (folder / "identity.key").exists() == (code != 0)


def test_a_script_must_say_force(folder: Path, capsys: Output) -> None:
    """Without a terminal nothing is asked, and nothing removed."""
    assert forget() == ExitCode.USAGE
    assert "--force" in capsys.readouterr().err
    assert (folder / "checkpoints").exists()


def test_a_running_node_keeps_its_files(folder: Path, capsys: Output) -> None:
    """A locked directory, also one below local/, is refused as a whole."""
    (folder / "local" / "1").mkdir(parents=True)
    (folder / "local" / "1" / "identity.key").write_bytes(b"x")
    for place in (folder, folder / "local" / "1"):
        with locked(place):
            assert forget("--force") == ExitCode.STATE_DIRECTORY
        assert f"a node runs on {Path('state') / place.relative_to(folder)}" in capsys.readouterr().err
    assert (folder / "identity.key").exists()


def test_another_folder_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    """A mistyped directory, which no node has used, is an error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "lock").write_text("mine")

    assert forget("--force") == ExitCode.STATE_DIRECTORY
    assert "is no state directory" in capsys.readouterr().err
    assert (tmp_path / "state" / "lock").read_text() == "mine"
