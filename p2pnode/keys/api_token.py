"""The token of the HTTP API: a file that only its owner can read, created at the first start and then kept.

It authorizes changes through the API, such as pausing the node or making it leave. The daemon creates and reads it; the
commands read it. It never appears in logs, `/status`, errors or command lines.
"""

from __future__ import annotations

import base64
import os
import stat
from pathlib import Path

from p2pnode.errors import ExitCode, P2PNodeError, UserError

#: Its name in the state directory, unless `status.token_file` names another file.
TOKEN_FILE = "status.token"  # noqa: S105 -- a name, no token
TOKEN_BYTES = 32
#: Bounds for a token that was written by hand, in characters.
MIN_CHARACTERS = 16
MAX_CHARACTERS = 4096
#: The group may read it, as key files (service accounts, Kubernetes' fsGroup). Others may not, and only the owner may
#: write it.
_FORBIDDEN_MODE = stat.S_IWGRP | stat.S_IXGRP | stat.S_IRWXO


class TokenNotReadable(P2PNodeError):
    """The token cannot be read; the text is the reason."""


def token_path(state_folder: Path, token_file: str) -> Path:
    """The path of the token: `status.token_file`, or its default in the state directory."""
    return Path(token_file).expanduser() if token_file else state_folder / TOKEN_FILE


def load_or_create(path: Path, new: bytes) -> str:
    """Read the token, or write `new` (random bytes) as text if there is none. Raises `UserError` (exit code 7)."""
    try:
        text = base64.urlsafe_b64encode(new).decode().rstrip("=")
        # O_EXCL: never writes through a link, or into an existing file.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        try:
            return read(path)
        except TokenNotReadable as error:
            raise _unusable(path, str(error)) from None
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from None
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        path.unlink(missing_ok=True)
        raise _unusable(path, error.strerror or str(error)) from None
    return text


def read(path: Path) -> str:
    """The token, from a file that no other user can read, and only its owner write. Raises `TokenNotReadable`."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            raw = file.read(MAX_CHARACTERS + 1)
    except OSError as error:
        raise TokenNotReadable(error.strerror or str(error)) from None
    if stat.S_IMODE(found.st_mode) & _FORBIDDEN_MODE:
        raise TokenNotReadable(f"others may read or write it (mode {stat.S_IMODE(found.st_mode):04o}): chmod 600 it")
    if found.st_uid not in (os.geteuid(), 0):
        raise TokenNotReadable("it belongs to another user")
    text = raw.decode("ascii", "replace").strip()
    if not (
        MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS and text.isascii() and text.isprintable() and " " not in text
    ):
        raise TokenNotReadable(
            f"it is no token: one word of {MIN_CHARACTERS} to {MAX_CHARACTERS} printable characters is expected"
        )
    return text


def _unusable(path: Path, reason: str) -> UserError:
    return UserError(
        f"the token file {path} cannot be used: {reason}",
        "remove it to have a new one made, or name another with status.token_file",
        ExitCode.STATE_DIRECTORY,
    )
