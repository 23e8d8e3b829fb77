"""The lock of a state directory: one process at a time uses it."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from p2pnode.errors import ExitCode, UserError, state_directory_unusable

LOCK_FILE = "lock"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the directory if it is missing, and hold its lock. Raises `UserError` if another process has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock: IO[str] = (folder / LOCK_FILE).open("w")
    except OSError as error:
        raise state_directory_unusable(folder, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"another node runs on the state directory {folder}",
                hint="end it with `p2pnode leave`; or start another node beside it: `p2pnode start --local`, or "
                "`p2pnode run --local -- …` with a program, or with its own --state-dir",
                exit_code=ExitCode.STATE_DIRECTORY,
            ) from error
        yield


def is_locked(folder: Path) -> bool:
    """Whether a process has the lock at this moment; creates nothing."""
    try:
        with (folder / LOCK_FILE).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
