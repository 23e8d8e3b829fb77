"""The lock on a state directory, and what a failed start leaves in a fresh one."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from p2pnode.config.directory_record import RECORD_FILE
from p2pnode.directory_lock import LOCK_FILE, empty_again, is_fresh, is_locked, locked
from p2pnode.errors import ExitCode, UserError
from p2pnode.log_file import LOG_FILE


@pytest.mark.promise(20)
def test_a_state_directory_has_one_node_at_a_time(tmp_path: Path) -> None:
    """The directory is private and locked; after the first node has ended, the next may start."""
    folder = tmp_path / "a" / "state"
    with locked(folder):
        assert folder.stat().st_mode & 0o777 == 0o700
        with pytest.raises(UserError, match="another node runs") as refused, locked(folder):
            pass
        assert refused.value.exit_code == ExitCode.STATE_DIRECTORY
    with locked(folder):
        pass


def test_a_state_directory_below_a_file_is_refused(tmp_path: Path) -> None:
    """What cannot be created is an error of the user with the system's reason."""
    (tmp_path / "file").write_text("")

    with pytest.raises(UserError, match="cannot be used"), locked(tmp_path / "file" / "state"):
        pass


def test_a_look_at_the_lock_changes_nothing(tmp_path: Path) -> None:
    """A directory without the file is not locked and gets none; a held lock is seen, also from the same process."""
    assert not is_locked(tmp_path)
    assert list(tmp_path.iterdir()) == []

    with locked(tmp_path):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_two_that_look_at_the_lock_do_not_see_each_other(tmp_path: Path) -> None:
    """Two commands at one moment do not take each other for a node."""
    (tmp_path / LOCK_FILE).touch()
    with (tmp_path / LOCK_FILE).open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert not is_locked(tmp_path)


def failed_start(folder: Path, writes: tuple[str, ...] = ("identity", "api-token")) -> None:
    """A start that writes files and fails."""
    fresh = is_fresh(folder)
    with locked(folder):
        for name in writes:
            (folder / name).write_text("x")
        (folder / "shards").mkdir(exist_ok=True)
        if fresh:
            empty_again(folder)


def test_a_failed_start_leaves_nothing(tmp_path: Path) -> None:
    """Identity, token, folders and the directory itself are gone."""
    failed_start(tmp_path / "state")

    assert not (tmp_path / "state").exists()


def test_what_a_trainer_printed_stays(tmp_path: Path) -> None:
    """The error of a failed start refers to trainer.log."""
    folder = tmp_path / "state"

    failed_start(folder, ("identity", "trainer.log"))

    assert [entry.name for entry in folder.iterdir()] == ["trainer.log"]


def test_a_directory_that_is_used_keeps_everything(tmp_path: Path) -> None:
    """A start whose node entered a swarm, and one on older files, remove nothing."""
    entered, older = tmp_path / "entered", tmp_path / "older"
    older.mkdir()
    (older / "swarm.json").write_text("key")

    failed_start(entered, ("identity", RECORD_FILE))
    failed_start(older)

    assert (entered / "identity").exists()
    assert (older / "identity").exists()
    assert (older / "swarm.json").exists()


def test_a_log_that_was_begun_before_the_start_changes_nothing(tmp_path: Path) -> None:
    """`start --background` opens it first: the directory is fresh, and only the log stays."""
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / LOG_FILE).write_text("why it failed\n")
    failed_start(folder)
    assert [path.name for path in folder.iterdir()] == [LOG_FILE]
