"""Reads a node's swarm key, and writes key files and invitations.

A key comes from the file named by `swarm.key_file`, from standard input, or from the environment. It goes to the
transport only: it never enters the configuration, a log, the status or an error. As with ssh keys, a key file that
others may read is refused.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import IO

from p2pnode.config.settings import Config
from p2pnode.config.state_folders import has_been_in_swarm, run_of
from p2pnode.errors import ExitCode, UserError, state_directory_unusable
from p2pnode.keys.invitation_files import IN_ENVIRONMENT, KEY_FILE, KEY_VARIABLE, STANDARD_INPUT, SWARM_FILE, read_swarm
from p2pnode.overlay.sealing.swarm_key import BadKey, KeyRing
from p2pnode.overlay.system import FolderDisk

#: Far more than two keys and their comments need.
MAX_FILE_BYTES = 1 << 16
#: The group may read a key file (service accounts). Others may not, and only the owner may write it.
FORBIDDEN_MODE = stat.S_IWGRP | stat.S_IXGRP | stat.S_IRWXO


def find_keys(config: Config, environment: MutableMapping[str, str], standard_input: IO[bytes]) -> KeyRing | None:
    """The keys that the configuration names; None for an open swarm. Raises `UserError`, which never contains a key."""
    source = config.swarm.key_file
    if not source:
        return None
    if source == STANDARD_INPUT:
        return _parsed(standard_input.read(MAX_FILE_BYTES), "standard input")
    if source == IN_ENVIRONMENT:
        text = environment.pop(KEY_VARIABLE, "")  # child processes such as the trainer must not get it
        return _parsed(text.encode(), f"the environment variable {KEY_VARIABLE}")
    return read_key_file(Path(source).expanduser())


def read_key_file(path: Path) -> KeyRing:
    """The keys of a file. Raises `UserError` if it is missing, readable by others, or no key file."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise UserError(
            f"cannot read the swarm key file {path}: {error.strerror or error}",
            "make one with `p2pnode key new`, or take part in a swarm with `p2pnode key join`",
            ExitCode.CONFIGURATION,
        ) from None
    if os.name == "posix" and mode & FORBIDDEN_MODE:
        raise UserError(
            f"the swarm key file {path} is open to others (mode {mode:04o}): anyone who reads it is a member",
            f"chmod 600 {path}; if others may have read it, rotate the key",
            ExitCode.CONFIGURATION,
        )
    return _parsed(content, f"the file {path}")


def _parsed(content: bytes, where: str) -> KeyRing:
    try:
        return KeyRing.parse(content.decode("ascii"))
    except (BadKey, UnicodeDecodeError) as error:
        reason = str(error) if isinstance(error, BadKey) else "it is not plain text"
        raise UserError(
            f"{where} has no usable swarm key: {reason}",
            "`p2pnode key new` makes a key file, `p2pnode key invite` an invitation with the key in it",
            ExitCode.CONFIGURATION,
        ) from None


def write_key_file(path: Path, keys: KeyRing) -> None:
    """Replace the file atomically, readable only by its owner. Raises `UserError`."""
    _write_secret(path, keys.text, "the swarm key file")


def write_invitation(path: Path, line: str) -> None:
    """The same for a file with an invitation, which contains the key."""
    _write_secret(path, f"{line}\n", "the invitation to")


def _write_secret(path: Path, text: str, what: str) -> None:
    try:
        FolderDisk(path.parent).write(path.name, text.encode("utf-8"), private=True)
    except OSError as error:
        raise UserError(
            f"cannot write {what} {path}: {error.strerror or error}",
            "check the folder, its permissions and free space",
            ExitCode.STATE_DIRECTORY,
        ) from None


def save_invitation(folder: Path, run: str, addresses: list[str], keys: KeyRing) -> bool:
    """Write an invitation to a state directory; returns whether anything changed. Raises `UserError`.

    A directory belongs to one swarm from the moment its node is in it: from then on a new key is accepted only together
    with a known one, during a rotation, and an open swarm's directory takes none. Before, a new invitation replaces an
    earlier one, but never a key that was made here.
    """
    file = folder / KEY_FILE
    known_run, known_addresses = read_swarm(folder)
    known = read_key_file(file) if file.exists() else None
    if known == keys and (known_run, known_addresses) == (run, addresses):
        return False
    shares_key = known is not None and bool(set(known) & set(keys))
    if has_been_in_swarm(folder):
        fits = shares_key and run_of(folder) in (run, "")
    else:
        fits = known is None or shares_key or bool(known_run)
    if not fits:
        what = "is of an open swarm, which has no key" if known is None else "belongs to another swarm"
        raise UserError(
            f'the state directory {folder} {what}; this invitation is to run "{run}"',
            "leave --state-dir out (each run has its own directory), or name another one; "
            f"`p2pnode forget --state-dir {folder}` removes what is there",
            ExitCode.MISMATCH,
        )
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        content = {"run": run, "bootstrap": addresses}
        FolderDisk(folder).write(SWARM_FILE, json.dumps(content, indent=1).encode())
    except OSError as error:
        raise state_directory_unusable(folder, error) from error
    write_key_file(file, keys)
    return True


def own_input() -> IO[bytes]:
    """This process's standard input, as bytes."""
    return sys.stdin.buffer
