"""Which state directory a command means: one per run below `~/.local/state/p2pnode`, unless a setting names another.

Without a run, the only directory there is; a command that asks a node prefers the one whose node runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from p2pnode.config.directory_record import RECORD_FILE, read_record
from p2pnode.config.settings import STATE_HOME, folder_name
from p2pnode.errors import ExitCode, UserError
from p2pnode.overlay.settings import SwarmSettings

#: A folder with one of these is a state directory.
MARKS = (RECORD_FILE, "swarm.key", "swarm.json", "identity.key")
#: Below the directory of a run: the directories of the nodes that `--local` starts, numbered from 1.
LOCAL = "local"


class Choice(NamedTuple):
    """A state directory, and why it was chosen."""

    folder: Path
    origin: str


def default_folder(run: str) -> Path:
    """The directory of a run, if no setting names one."""
    return Path(STATE_HOME).expanduser() / folder_name(run)


def run_of(folder: Path) -> str:
    """The run that a directory belongs to, by its record, an accepted invitation or a checkpoint; empty if none of them
    is there. Raises `UserError` for an unreadable record."""
    recorded = read_record(folder).run
    if recorded:
        return recorded
    for place in local_folders(folder):
        if run := run_of(place):
            return run
    for file in (folder / "swarm.json", *sorted((folder / "checkpoints").glob("*/state.json"), reverse=True)):
        try:
            run = json.loads(file.read_bytes()).get("run", "")
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(run, str) and run:
            return run
    return ""


def has_been_in_swarm(folder: Path) -> bool:
    """Whether a node has entered a swarm with this directory."""
    return bool(read_record(folder).run) or (folder / "genesis").is_file()


def choose(run: str, is_running: Callable[[Path], bool], *, for_running: bool) -> Choice:
    """The directory for a run, or, with an empty `run`, for a command that names none.

    `for_running`: the command asks a node, so where several directories are, the one whose node runs is meant.
    Raises `UserError` (exit code 2) if several could be meant.
    """
    if run:
        return Choice(default_folder(run), f"run {run}")
    known = [folder for folder in _subfolders(Path(STATE_HOME).expanduser()) if _is_state(folder)]
    if for_running and len(known) > 1:
        known = [folder for folder in known if is_running(folder)] or known
    if len(known) > 1:
        unnamed = default_folder(SwarmSettings().run)
        if unnamed in known:
            return Choice(unnamed, "default")
        raise UserError(
            f"several runs have a state directory here: {', '.join(sorted(run_of(one) or one.name for one in known))}",
            "name the run with --run, or its directory with --state-dir",
            ExitCode.USAGE,
        )
    if not known:
        return Choice(default_folder(SwarmSettings().run), "default")
    return Choice(known[0], "the only run here")


def _is_state(folder: Path) -> bool:
    return any((folder / mark).is_file() for mark in MARKS) or (folder / LOCAL).is_dir()


def _subfolders(home: Path) -> Iterable[Path]:
    try:
        return sorted(entry for entry in home.iterdir() if entry.is_dir())
    except OSError:
        return []


def local_folders(folder: Path) -> list[Path]:
    """The directories of the nodes that `--local` started for this one, by number."""
    found = [entry for entry in _subfolders(folder / LOCAL) if entry.name.isdigit()]
    return sorted(found, key=lambda entry: int(entry.name))
