"""One file to attach to a report of a fault: what a node says, its log, its settings, without its secrets.

Files with secrets are read only to find their contents elsewhere: each text passes a `Redactor` that knows them. Names
and sizes of all files in the state directory are in the bundle, and contents only of those that are named here.
"""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import time
from collections.abc import Callable, Iterator
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
from p2pnode.redaction import Redactor

#: Files of a state directory whose text is taken.
TAKEN = (RECORD_FILE, LOG_FILE, FORMER_FILE, "trainer.log", "trainer.log.1")
#: The newest bytes of each.
MAX_FILE_BYTES = 4 << 20
#: Files with secrets.
SECRET = ("identity.key", KEY_FILE, TOKEN_FILE)
#: Steps of the node that are taken.
STEPS = 1000


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
