"""Exit codes and errors for the user."""

from __future__ import annotations

from p2pnode.errors import MEANINGS, ExitCode


def test_every_exit_code_is_documented() -> None:
    """Each code has its meaning, and none is given twice."""
    assert set(MEANINGS) == set(ExitCode)
    assert sorted(MEANINGS) == list(range(len(ExitCode)))
