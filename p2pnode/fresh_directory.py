"""Removes what a failed start has written into a state directory that was fresh.

A start is told its settings again after a mistake, such as a port that is in use. An identity and a token that such a
start leaves behind would make the directory look used.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from p2pnode.config.directory_record import RECORD_FILE
from p2pnode.directory_lock import LOCK_FILE
from p2pnode.log_file import LOG_FILE

#: What a trainer printed, and the log of a node in the background: they say why the start failed.
KEPT_PREFIXES = ("trainer.log", LOG_FILE)


class StartOutcome:
    """How a start went. `exit_code` is set by the caller; a start that raised has none."""

    exit_code: int | None = None


def is_fresh(folder: Path) -> bool:
    """Whether the directory is missing, or has nothing but a lock and logs."""
    try:
        return all(entry.name == LOCK_FILE or entry.name.startswith(KEPT_PREFIXES) for entry in folder.iterdir())
    except FileNotFoundError:
        return True
    except OSError:
        return False  # the lock says what is wrong


@contextlib.contextmanager
def emptied_on_failure(folder: Path, *, fresh: bool) -> Iterator[StartOutcome]:
    """Within the lock of the directory: empty it again if it was `fresh` and the start fails.

    A start fails if it raises, or ends with an exit code other than 0, before its node has entered a swarm. From then
    on the directory has a record (`p2pnode.config.directory_record`), and stays as it is.
    """
    outcome = StartOutcome()
    try:
        yield outcome
    finally:
        if fresh and outcome.exit_code != 0 and not (folder / RECORD_FILE).exists():
            with contextlib.suppress(OSError):
                _empty(folder)


def _empty(folder: Path) -> None:
    # The lock last: until then no other node can start here.
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name == LOCK_FILE):
        if entry.name.startswith(KEPT_PREFIXES):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    with contextlib.suppress(OSError):  # not empty
        folder.rmdir()
