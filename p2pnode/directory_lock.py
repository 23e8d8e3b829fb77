"""The lock of a state directory: one process at a time uses it. A failed start leaves a fresh one as it was.

A start is told its settings again after a mistake, such as a port that is in use. An identity and a token that such a
start leaves behind would make the directory look used.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from p2pnode.config.directory_record import RECORD_FILE
from p2pnode.errors import ExitCode, UserError, state_directory_unusable
from p2pnode.log_file import LOG_FILE

LOCK_FILE = "lock"
#: What a trainer printed, and the log of a node in the background: they say why the start failed.
KEPT_PREFIXES = ("trainer.log", LOG_FILE)


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
            raise taken(folder) from error
        yield


def taken(folder: Path, whose: str = "") -> UserError:
    """The error of a second node on a directory; `whose` says more of the first one."""
    return UserError(
        f"another node runs on the state directory {folder}{whose}",
        "end it with `p2pnode leave`; or start another node beside it: `p2pnode start --local`, or "
        "`p2pnode run --local -- …` with a program, or with its own --state-dir",
        ExitCode.STATE_DIRECTORY,
    )


def is_locked(folder: Path) -> bool:
    """Whether a process has the lock at this moment; creates nothing. Two that look at once do not see each other."""
    try:
        with (folder / LOCK_FILE).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def is_fresh(folder: Path) -> bool:
    """Whether the directory is missing, or has nothing but a lock and logs."""
    try:
        return all(entry.name == LOCK_FILE or entry.name.startswith(KEPT_PREFIXES) for entry in folder.iterdir())
    except FileNotFoundError:
        return True
    except OSError:
        return False  # the lock says what is wrong


def empty_again(folder: Path) -> None:
    """Remove what a failed start has written into a fresh directory, under its lock.

    A node that has entered a swarm, or through which others have entered a new one, has a record
    (`p2pnode.config.directory_record`): its directory stays as it is.
    """
    if (folder / RECORD_FILE).exists():
        return
    with contextlib.suppress(OSError):
        # The lock last: until then no other node can start here.
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name == LOCK_FILE):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif not entry.name.startswith(KEPT_PREFIXES):
                entry.unlink()
        folder.rmdir()
