"""`p2pnode forget`: remove what a run left in its state directory, after showing it.

Only files that p2pnode itself writes are removed, so a mistyped --state-dir costs nothing; what else lies in the
directory, such as an exported model, stays.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from p2pnode.commands.options import JsonOption, Place, takes
from p2pnode.commands.output import print_answer, print_line
from p2pnode.config.directory_record import RECORD_FILE
from p2pnode.config.state_folders import LOCAL, MARKS, local_folders, run_of
from p2pnode.errors import ExitCode, UserError, state_directory_unusable
from p2pnode.log_file import FORMER_FILE, LOG_FILE
from p2pnode.terminal import numbers

#: What a node writes, and of what cannot be made again what it is to the user.
WRITTEN = {
    "checkpoints": "the model, the optimiser and the shards of this node",
    "dispatch.sqlite": "the queue of records, if it was the master: what is trained of this pass",
    "swarm.key": "the swarm key: without another copy nobody can join this swarm any more",
    **dict.fromkeys(
        f"model identity.key incarnation genesis {RECORD_FILE} peers.json capacity.json fences.msgpack dispatch.json "
        "dispatch.sqlite-shm dispatch.sqlite-wal swarm.json status.token status.json dashboard.html trainer.log "
        f"trainer.log.1 {LOG_FILE} {FORMER_FILE} trainer devices lock".split(),
        "",
    ),
}


class Contents(NamedTuple):
    """What is in a state directory: the entries that go, with their sizes in bytes, and those that stay."""

    folder: Path
    goes: dict[str, int]
    stays: list[str]


@takes(Place)
def forget(
    place: Place,
    force: Annotated[bool, typer.Option("--force", help="Do not ask first.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Remove what a run left in its state directory, after showing what goes.

    Example: p2pnode forget --run digits
    """
    folder = place.loaded(joining=True).config.state_folder
    from p2pnode.directory_lock import is_locked  # not on every system, and no other command needs it

    places = [one for one in (*local_folders(folder), folder) if _is_state(one)]
    if not places:
        hint = "`p2pnode config show --origin` shows which directory is used; name it with --run or --state-dir"
        raise UserError(f"{folder} is no state directory: nothing was removed", hint, ExitCode.STATE_DIRECTORY)
    for one in places:
        if is_locked(one):
            hint = f"end it first: p2pnode leave --state-dir {one}"
            raise UserError(f"a node runs on {one}: nothing was removed", hint, ExitCode.STATE_DIRECTORY)
    found = [contents_of(one) for one in places]
    name = next((named for one in reversed(places) if (named := run_of(one))), folder.name)
    runs = [run_of(contents.folder) for contents in found]
    for contents, of in zip(found, runs, strict=True):
        if not as_json:
            print_line(_shown(contents, of))
        elif not force:  # what is agreed to is seen before, and the answer is the object alone
            sys.stderr.write(_shown(contents, of) + "\n")
    if not force and not _agreed(name):
        raise UserError("nothing was removed", "add --force to remove it without being asked", ExitCode.USAGE)
    for contents in found:
        _remove(contents)
    for shared in ("lock", LOG_FILE, FORMER_FILE):
        (folder / LOCAL / shared).unlink(missing_ok=True)
    for one in (folder / LOCAL, folder):
        with contextlib.suppress(OSError):  # missing, or not empty
            one.rmdir()
    described = [_as_json(contents, of) for contents, of in zip(found, runs, strict=True)]
    text = f"removed; {folder} is free for another run" if folder.exists() else f"removed {folder}"
    return print_answer(text, {"path": str(folder), "directories": described}, as_json=as_json)


def contents_of(folder: Path) -> Contents:
    """The entries of a state directory. Raises `UserError`."""
    try:
        entries = sorted(folder.iterdir(), key=lambda entry: entry.name)
    except OSError as error:
        raise state_directory_unusable(folder, error) from error
    goes = {entry.name: _size(entry) for entry in entries if entry.name.removesuffix(".tmp") in WRITTEN}
    stays = [entry.name for entry in entries if entry.name not in goes and entry.name != LOCAL]
    return Contents(folder, goes, stays)


def _shown(contents: Contents, run: str) -> str:
    of_run = f" of run {run}" if run else ""
    lines = [f"{contents.folder}{of_run} has:"]
    for name, size in contents.goes.items():
        lines.append(f"  {name:<14}{numbers.size(size):>10}  {WRITTEN[name.removesuffix('.tmp')]}".rstrip())
    if contents.stays:
        lines.append(f"  this stays: {', '.join(contents.stays)}")
    return "\n".join(lines)


def _as_json(contents: Contents, run: str) -> dict[str, object]:
    return {"path": str(contents.folder), "run": run, "removed": contents.goes, "stays": contents.stays}


def _agreed(name: str) -> bool:
    """Ask at the terminal; False where there is none."""
    if not sys.stdin.isatty():
        return False
    sys.stderr.write(f"remove all of it? Type the name of the run, {name}, to agree: ")
    sys.stderr.flush()
    return sys.stdin.readline().strip() == name


def _remove(contents: Contents) -> None:
    try:
        # The lock last: until then no node can start on what is left.
        for name in sorted(contents.goes, key=lambda name: name == "lock"):
            entry = contents.folder / name
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
        if not contents.stays and contents.folder.parent.name == LOCAL:
            contents.folder.rmdir()
    except OSError as error:
        raise state_directory_unusable(contents.folder, error) from error


def _is_state(folder: Path) -> bool:
    return any((folder / mark).is_file() for mark in MARKS)


def _size(entry: Path) -> int:
    files = entry.rglob("*") if entry.is_dir() and not entry.is_symlink() else [entry]
    total = 0
    for file in files:
        with contextlib.suppress(OSError):
            total += file.lstat().st_size if not file.is_dir() else 0
    return total
