"""Exit codes and errors for the user."""

from __future__ import annotations

from p2pnode.errors import MEANINGS, ExitCode, P2PNodeError, UserError, state_directory_unusable


def test_every_exit_code_is_documented() -> None:
    """Each code has its meaning, and none is given twice."""
    assert set(MEANINGS) == set(ExitCode)
    assert sorted(MEANINGS) == list(range(len(ExitCode)))


def test_user_errors_are_whole_in_a_log() -> None:
    """As text a UserError has both halves."""
    assert str(UserError("a", "b", ExitCode.CONFIGURATION)) == "a (b)"
    assert str(UserError("a")) == "a"


def test_an_unusable_state_directory_names_folder_and_reason() -> None:
    """The reason is the system's text, not the number; the exit code is the documented one."""
    error = state_directory_unusable("/srv/node", PermissionError(13, "Permission denied"))

    assert isinstance(error, P2PNodeError)
    assert error.message == "the state directory /srv/node cannot be used: Permission denied"
    assert error.exit_code == ExitCode.STATE_DIRECTORY
