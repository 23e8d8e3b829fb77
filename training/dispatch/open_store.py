"""From `dispatch.store` to a store: "sqlite", "sqlite:PATH" or "etcd://host:port,host:port/prefix"."""

from __future__ import annotations

from pathlib import Path

from overlay.environment import Environment
from training.dispatch.sqlite_store import SqliteStore
from training.dispatch.store import Store
from training.errors import TrainingError

#: The file in the state directory where the setting names none.
FILE_NAME = "dispatch.sqlite"


class BadStoreSetting(TrainingError):
    """`dispatch.store` names no store; the text says what is wrong and what is right."""


def open_store(spec: str, folder: Path, environment: Environment) -> Store:
    """The store that a setting names, not opened yet; `folder` is the state directory. Raises `BadStoreSetting`."""
    kind, _, rest = spec.partition(":")
    if kind == "sqlite":
        path = Path(rest) if rest else Path(FILE_NAME)
        return SqliteStore(path if path.is_absolute() else folder / path, environment.executor)
    raise BadStoreSetting(
        f'dispatch.store = "{spec}" names no store: give "sqlite", "sqlite:PATH" or "etcd://host:port/prefix"'
    )
