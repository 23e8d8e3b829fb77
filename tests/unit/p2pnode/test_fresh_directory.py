"""A failed start leaves a fresh state directory as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pnode.config.directory_record import RECORD_FILE
from p2pnode.directory_lock import locked
from p2pnode.fresh_directory import emptied_on_failure, is_fresh
from p2pnode.log_file import LOG_FILE


def start(folder: Path, *, exit_code: int | None, writes: tuple[str, ...] = ("identity", "api-token")) -> None:
    """A start that writes files and ends so; it raises without an exit code."""
    fresh = is_fresh(folder)
    with locked(folder), emptied_on_failure(folder, fresh=fresh) as outcome:
        for name in writes:
            (folder / name).write_text("x")
        (folder / "shards").mkdir(exist_ok=True)
        if exit_code is None:
            raise RuntimeError("the port is in use")
        outcome.exit_code = exit_code


@pytest.mark.parametrize("exit_code", [None, 4])
def test_a_failed_start_leaves_nothing(tmp_path: Path, exit_code: int | None) -> None:
    """Identity, token, folders and the directory itself are gone, whether the start raised or ended with a code."""
    folder = tmp_path / "state"

    try:
        start(folder, exit_code=exit_code)
    except RuntimeError:
        assert exit_code is None

    assert not folder.exists()


def test_what_a_trainer_printed_stays(tmp_path: Path) -> None:
    """The error of a failed start refers to trainer.log."""
    folder = tmp_path / "state"

    start(folder, exit_code=8, writes=("identity", "trainer.log"))

    assert [entry.name for entry in folder.iterdir()] == ["trainer.log"]


def test_a_directory_that_is_used_keeps_everything(tmp_path: Path) -> None:
    """A start that ends well, one whose node entered a swarm, and one on older files remove nothing."""
    well, entered, older = (tmp_path / name for name in ("well", "entered", "older"))
    older.mkdir()
    (older / "swarm.json").write_text("key")

    start(well, exit_code=0)
    start(entered, exit_code=4, writes=("identity", RECORD_FILE))
    start(older, exit_code=4)

    assert (well / "identity").exists()
    assert (entered / "identity").exists()
    assert (older / "identity").exists()
    assert (older / "swarm.json").exists()


def test_a_log_that_was_begun_before_the_start_changes_nothing(tmp_path: Path) -> None:
    """`start --background` opens it first: the directory is fresh, and only the log stays."""
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / LOG_FILE).write_text("why it failed\n")
    start(folder, exit_code=4)
    assert [path.name for path in folder.iterdir()] == [LOG_FILE]
