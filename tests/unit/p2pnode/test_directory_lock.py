"""The lock on a state directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pnode.directory_lock import is_locked, locked
from p2pnode.errors import ExitCode, UserError


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
