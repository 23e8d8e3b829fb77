"""One file to attach to a report of a fault: what a node says, its log, its settings, without its secrets.

Files with secrets are read only to find their contents elsewhere: each text passes a `Redactor` that knows them. Names
and sizes of all files in the state directory are in the bundle, and contents only of those that are named here.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from p2pnode.client import NodeClient, RunningNode
from p2pnode.config.directory_record import RECORD_FILE
from p2pnode.config.settings import Config
from p2pnode.directory_lock import is_locked
from p2pnode.errors import UserError
from p2pnode.keys.api_token import TOKEN_FILE
from p2pnode.keys.invitation_files import KEY_FILE
from p2pnode.log_file import FORMER_FILE, LOG_FILE
from p2pnode.overlay.sealing import invitation, swarm_key

#: Files of a state directory whose text is taken.
TAKEN = (RECORD_FILE, LOG_FILE, FORMER_FILE, "trainer.log", "trainer.log.1")
#: The newest bytes of each.
MAX_FILE_BYTES = 4 << 20
#: Files with secrets.
SECRET = ("identity.key", KEY_FILE, TOKEN_FILE)
#: Steps of the node that are taken.
STEPS = 1000
REMOVED = "[removed]"
#: A shorter text would be found in words; no secret of this program is.
LEAST_CHARACTERS = 8

_FORMS = (
    re.compile(re.escape(swarm_key.PREFIX) + r"[A-Za-z2-7=]+"),
    re.compile(re.escape(invitation.MARK) + r"\d+:[A-Za-z0-9_=-]{8,}"),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"(?<=Bearer )[^\s\"',]+", re.IGNORECASE),
    re.compile(r"(?<=#token=)[^\s\"'<>]+"),
    re.compile(r"(?<=://)[^/@\s:\"]+:[^/@\s\"]+(?=@)"),
)
#: A name that says that its value is secret, and the value: in TOML, JSON, a command line or an assignment.
_NAMED = re.compile(
    r"((?:\b|_|-)(?:password|passwd|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|credentials?)[\"']?\s*[=:]\s*)"
    r"(\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|[^\s,;&\"'}\]]+)",
    re.IGNORECASE,
)


def secrets_of(config: Config, folders: list[Path]) -> list[bytes]:
    """The contents of all files with secrets that the node has; what cannot be read cannot get into the bundle."""
    source = config.swarm.key_file
    files = [folder / name for folder in folders for name in SECRET]
    files += [Path(text).expanduser() for text in (source, config.status.token_file) if text and text != "-"]
    found = []
    for file in files:
        with contextlib.suppress(OSError):
            found.append(file.read_bytes())
    return found


def texts_of(folder: Path, node: RunningNode | None) -> Iterator[tuple[str, str]]:
    """Names and texts of one node, its secrets not removed yet."""
    yield "files.txt", "\n".join(_listing(folder)) + "\n"
    for name in TAKEN:
        with contextlib.suppress(OSError), (folder / name).open("rb") as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(max(0, size - MAX_FILE_BYTES))
            yield name, file.read().decode("utf-8", "replace")
    if node is None:
        return
    client = NodeClient.of(node)
    asked: dict[str, Callable[[], Any]] = {
        "status.json": client.status,
        "peers.json": client.peers,
        "steps.json": lambda: client.steps(STEPS),
        "events.json": client.events,
    }
    for name, ask in asked.items():
        try:
            yield name, json.dumps(ask(), indent=1)
        except UserError as failure:
            yield name, json.dumps({"error": failure.message})


def _listing(folder: Path) -> Iterator[str]:
    """Mode, size, time and name of each file."""
    yield f"{folder}, {'in use' if is_locked(folder) else 'not in use'}"
    try:
        for file in sorted(folder.rglob("*")):
            with contextlib.suppress(OSError):
                found = file.lstat()
                when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(found.st_mtime))
                yield f"{found.st_mode & 0o7777:04o} {found.st_size:>12} {when} {file.relative_to(folder)}"
    except OSError as failure:
        yield f"cannot be read: {failure.strerror or failure}"


def write(path: Path, texts: Iterator[tuple[str, str]], redactor: Redactor) -> list[str]:
    """Write the archive; returns the names in it. Raises `OSError`."""
    names = []
    with tarfile.open(path, "w:gz") as archive:
        for name, text in texts:
            content = redactor.clean(text).encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"p2pnode-bundle/{name}")
            entry.size, entry.mode, entry.mtime = len(content), 0o600, int(time.time())
            archive.addfile(entry, io.BytesIO(content))
            names.append(name)
    return names


class Redactor:
    """`clean` removes the given secrets in each of their forms, and everything that looks like one."""

    def __init__(self, secrets: Iterable[bytes]) -> None:
        forms = {form for secret in secrets for form in _forms_of(secret) if len(form) >= LEAST_CHARACTERS}
        # The longest first: a part of one may be another.
        self._known = [re.compile(re.escape(form)) for form in sorted(forms, key=lambda form: (-len(form), form))]

    def clean(self, text: str) -> str:
        for form in (*self._known, *_FORMS):
            text = form.sub(REMOVED, text)
        return _NAMED.sub(lambda found: found[1] + _in_place_of(found[2]), text)


def _in_place_of(value: str) -> str:
    """Keeps the quotes, so that JSON and TOML stay valid; an empty value says that none is set."""
    if value in ('""', "''", "null", "None"):
        return value
    return f'"{REMOVED}"' if value.startswith('"') else f"'{REMOVED}'" if value.startswith("'") else REMOVED


def _forms_of(secret: bytes) -> set[str]:
    """As text, hexadecimal, and in the alphabets of base64 and base32."""
    found = {secret.hex(), secret.hex().upper()}
    for coded in (base64.b64encode(secret), base64.urlsafe_b64encode(secret), base64.b32encode(secret)):
        text = coded.decode("ascii").rstrip("=")
        found |= {text, text.lower()} if coded.isupper() else {text}
    try:
        text = secret.decode("utf-8")
    except UnicodeDecodeError:
        return found
    return found | {line.strip() for line in text.splitlines() if not line.startswith("#")}
