"""Which state directory a command means; what its record keeps of a start, and what it refuses later."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from p2pnode.config.directory_record import (
    RECORD_FILE,
    DirectoryRecord,
    Given,
    check_model,
    check_run,
    decode,
    encode,
    given_in,
    kept_settings,
    read_record,
    settings_of,
)
from p2pnode.config.load import Override, load
from p2pnode.config.settings import STATE_HOME, Config, folder_name
from p2pnode.config.state_folders import choose, default_folder, has_been_in_swarm, local_folders, run_of
from p2pnode.errors import ExitCode, UserError
from p2pnode.overlay.settings import SwarmSettings

RECORD = DirectoryRecord(
    run="digits",
    founder=False,
    model="abc",
    tensors={"a": "2 x 3", "b": "4"},
    settings={"node.port": 9000},
)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Encoding and decoding give the same record; a directory without one has an empty record."""
    assert read_record(tmp_path) == DirectoryRecord()
    assert read_record(tmp_path / "absent") == DirectoryRecord()
    (tmp_path / RECORD_FILE).write_bytes(encode(RECORD))

    assert read_record(tmp_path) == RECORD


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"run": 3}', b"[" * 5000])
def test_a_damaged_record_is_one_sentence(content: bytes) -> None:
    """The error names the directory and has the exit code of the state directory."""
    with pytest.raises(UserError, match="in the state directory here") as refused:
        decode(content, "here")

    assert refused.value.exit_code == ExitCode.STATE_DIRECTORY


def test_what_a_start_was_told_is_kept() -> None:
    """Settings of the command line, and those that identify the node from any source; not where the directory is, how
    much is logged, and keys that are in no file. Earlier ones stay unless given anew; paths become absolute."""
    given = {
        "node.port": Given(9001, on_command_line=False),
        "training.local_steps": Given(20, on_command_line=True),
        "training.seed": Given(3, on_command_line=False),
        "training.data_dir": Given("data", on_command_line=False),
        "node.state_dir": Given("here", on_command_line=True),
        "log.level": Given("debug", on_command_line=True),
        "swarm.key_file": Given("-", on_command_line=True),
    }

    kept = kept_settings(given, {"node.port": 9000, "node.host": "0.0.0.0"})

    assert kept == {
        "node.host": "0.0.0.0",
        "node.port": 9001,
        "training.data_dir": str(Path.cwd() / "data"),
        "training.local_steps": 20,
    }


def test_only_what_was_chosen_for_this_start_counts_as_given(tmp_path: Path) -> None:
    """Flags, variables and a file count, the default in it too; what was remembered does not."""
    file = tmp_path / "node.toml"
    file.write_text('[node]\nhost = "10.0.0.5"\nport = 8468\n')

    loaded = load(
        file,
        {"P2PNODE_SWARM__RUN": "digits", "P2PNODE_SWARM__ALLOW_OPEN": "true"},
        [Override("training.options.part", "2", "--set")],
        remembered=lambda *_: [Override("training.task", '"mnist"', "node.json")],
    )

    assert given_in(loaded) == {
        "node.host": Given("10.0.0.5", on_command_line=False),
        "node.port": Given(8468, on_command_line=False),
        "swarm.run": Given("digits", on_command_line=False),
        "swarm.allow_open": Given(True, on_command_line=False),
        "training.options": Given({"part": 2}, on_command_line=True),
    }


def test_a_founder_remembers_no_bootstraps() -> None:
    """They would make it wait for others that wait for it. Settings of another version are left out."""
    settings = {"swarm.bootstrap": ["10.0.0.5:8468"], "node.port": 9000, "node.gone": 1}
    member = DirectoryRecord(run="digits", founder=False, settings=settings)
    founder = DirectoryRecord(run="digits", founder=True, settings=settings)

    assert settings_of(member) == {"swarm.run": "digits", "swarm.bootstrap": ["10.0.0.5:8468"], "node.port": 9000}
    assert settings_of(founder) == {"swarm.run": "digits", "node.port": 9000}
    assert settings_of(DirectoryRecord()) == {}


def test_another_run_is_refused_with_what_to_do() -> None:
    """Both runs and the directory are named, and three ways out; the same run, or none known, passes."""
    config = Config(swarm=SwarmSettings(run="text"))
    check_run("text", config, Path("here"))
    check_run("", config, Path("here"))
    with pytest.raises(UserError, match='belongs to run "digits", and this start is for run "text"') as refused:
        check_run("digits", config, Path("here"))

    assert refused.value.exit_code == ExitCode.MISMATCH
    for way in ("--state-dir", "p2pnode forget --state-dir here", "each run has its own"):
        assert way in refused.value.hint


@pytest.mark.parametrize(
    ("tensors", "difference"),
    [
        ({"a": "2 x 3"}, 'its "b" is not in the model of this start'),
        ({"a": "2 x 4", "b": "4"}, 'its "a" is 2 x 3, and here it is 2 x 4'),
        ({"a": "2 x 3", "b": "4", "c": "1"}, 'it has no "c", which the model of this start has'),
        ({"a": "2 x 3", "b": "4"}, "the types or the order of its tensors differ"),
    ],
    ids=["missing", "another shape", "added", "another type"],
)
def test_another_model_is_refused_by_its_first_difference(tensors: dict[str, str], difference: str) -> None:
    """The tensor is named with both shapes; exit code 5."""
    check_model(RECORD, "abc", tensors, "", "here")
    check_model(DirectoryRecord(run="digits"), "xyz", tensors, "", "here")
    with pytest.raises(UserError, match=difference) as refused:
        check_model(RECORD, "xyz", tensors, "", "here")

    assert refused.value.exit_code == ExitCode.MISMATCH
    assert "--run" in refused.value.hint
    assert "p2pnode forget" in refused.value.hint


def test_other_frozen_values_are_refused() -> None:
    """The vector of the directory was trained for them; a directory without a record does not know them."""
    frozen = msgspec.structs.replace(RECORD, frozen="f1")

    check_model(frozen, "abc", RECORD.tensors, "f1", "here")
    check_model(RECORD, "abc", RECORD.tensors, "f2", "here")
    with pytest.raises(UserError, match="tables of integers") as refused:
        check_model(frozen, "abc", RECORD.tensors, "f2", "here")

    assert refused.value.exit_code == ExitCode.MISMATCH


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
