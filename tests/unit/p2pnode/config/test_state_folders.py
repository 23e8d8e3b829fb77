"""Which state directory a command means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2pnode.config.directory_record import RECORD_FILE, DirectoryRecord, encode
from p2pnode.config.settings import STATE_HOME, folder_name
from p2pnode.config.state_folders import choose, default_folder, has_been_in_swarm, local_folders, run_of
from p2pnode.errors import ExitCode, UserError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that holds one state directory per run."""
    monkeypatch.setenv("HOME", str(tmp_path))
    place = Path(STATE_HOME).expanduser()
    place.mkdir(parents=True)
    return place


def used(folder: Path, run: str) -> Path:
    """A state directory whose node has been in a swarm."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORD_FILE).write_bytes(encode(DirectoryRecord(run=run)))
    return folder


def chosen(run: str = "", *, for_running: bool = False, running: Path | None = None) -> Path:
    return choose(run, lambda folder: folder == running, for_running=for_running).folder


@pytest.mark.parametrize("run", ["..", ".", "a/b", "/etc", "~", "~root", ".hidden"])
def test_a_folder_name_stays_below_its_parent_and_hides_no_file(run: str) -> None:
    """Dots and slashes are coded; the name is one visible part of a path."""
    name = folder_name(run)

    assert name != run
    assert Path("/home", name).parent == Path("/home")
    assert not name.startswith((".", "~"))


def test_different_runs_have_different_folders() -> None:
    """Plain names are kept; coded and cut names differ as their runs do."""
    runs = ["digits", "a b", "a/b", "a%2Fb", "é", "x" * 64, "é" * 64, "é" * 63 + "x", "trainer", "%74rainer"]

    assert folder_name("digits") == "digits"
    assert folder_name("my run-2.1") == "my run-2.1"
    assert len({folder_name(run) for run in runs}) == len(runs)
    assert max(len(folder_name(run).encode()) for run in runs) < 255


def test_each_run_has_its_own_directory(home: Path) -> None:
    """A named run has its folder, whatever else is there; without a name, and with nothing there, the default run."""
    assert chosen() == home / "default"
    assert chosen("digits") == home / "digits" == default_folder("digits")
    used(home / "text", "text")
    assert chosen("digits") == home / "digits"


def test_without_a_run_the_only_directory_is_meant(home: Path) -> None:
    """A plain start continues with the only run; of several, the one named default; otherwise it asks for a name."""
    used(home / "digits", "digits")
    (home / "empty").mkdir()
    assert chosen() == home / "digits"
    used(home / "text", "text")
    with pytest.raises(UserError, match="several runs have a state directory here: digits, text") as refused:
        chosen()
    assert refused.value.exit_code == ExitCode.USAGE
    assert "--run" in refused.value.hint

    used(home / "default", "default")
    assert chosen() == home / "default"


def test_a_command_that_asks_a_node_means_the_one_that_runs(home: Path) -> None:
    """Of several directories, the one whose node runs; a start does not choose by that."""
    used(home / "digits", "digits")
    text = used(home / "text", "text")

    assert chosen(for_running=True, running=text) == text
    with pytest.raises(UserError, match="several runs"):
        chosen(running=text)


def test_a_checkpoint_names_the_run_where_the_record_is_lost(tmp_path: Path) -> None:
    """What the message about a damaged record says."""
    checkpoint = tmp_path / "checkpoints" / "00000001-step-0000000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"run": "digits"}))

    assert run_of(tmp_path) == "digits"


@pytest.mark.parametrize("content", ["{", "[]", '{"run": 3}', "{}"])
def test_unreadable_files_name_no_run(tmp_path: Path, content: str) -> None:
    """A damaged invitation or checkpoint is passed over; the record comes first."""
    (tmp_path / "swarm.json").write_text(content)
    assert run_of(tmp_path) == ""
    used(tmp_path, "digits")
    assert run_of(tmp_path) == "digits"


def test_a_directory_counts_as_used_once_its_node_was_in_a_swarm(tmp_path: Path) -> None:
    """A key or an invitation alone does not bind it; the record does, and so does the genesis."""
    (tmp_path / "swarm.key").write_text("key")
    (tmp_path / "swarm.json").write_text('{"run": "digits", "bootstrap": []}')
    assert not has_been_in_swarm(tmp_path)
    (tmp_path / "genesis").write_bytes(b"g" * 16)
    assert has_been_in_swarm(tmp_path)


def test_local_nodes_are_listed_by_number(tmp_path: Path) -> None:
    """Numbers, not texts; other folders are no nodes."""
    for name in ("10", "2", "1", "other"):
        (tmp_path / "local" / name).mkdir(parents=True)

    assert [folder.name for folder in local_folders(tmp_path)] == ["1", "2", "10"]
    assert local_folders(tmp_path / "absent") == []
