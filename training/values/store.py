"""The store of named values, as engines use it, and its errors.

Keys live at the owners of the exchange's shards; a daemon passes them on encoded (`training.values.client`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from p2pnode.training.errors import TrainingError
from p2pnode.training.values.encoding import Key
from p2pnode.training.values.reducers import Reducer


class Stamped(NamedTuple):
    """A value and its timestamp: the highest of the updates that it has, or what `pull` returned."""

    value: Any
    timestamp: int


class ValueUpdate(NamedTuple):
    """One update: `value` is the update itself. `timestamp` is the caller's, as a rule its step."""

    key: Key
    value: Any
    timestamp: int = 0
    reducer: Reducer = "pull"


class NewValue(NamedTuple):
    """A key's new value, from the user's `pull`."""

    key: Key
    value: Any
    timestamp: int


class EncodedUpdate(NamedTuple):
    """A `ValueUpdate` as a daemon passes it on: key and value are encoded (`training.values.encoding`)."""

    key: bytes
    value: bytes
    timestamp: int = 0
    reducer: Reducer = "pull"


#: An encoded value and its timestamp; and an encoded key with both.
EncodedValue = tuple[bytes, int]
EncodedResult = tuple[bytes, bytes, int]
#: The user's `pull`, for a daemon, which decodes nothing: the updates of a batch, in order, and the present values of
#: their keys. Gives new values; a key that it leaves out keeps its value. Raises `PullFailed`, or `ScriptGone`.
EncodedPull = Callable[[Sequence[EncodedUpdate], Mapping[bytes, EncodedValue]], Awaitable[Sequence[EncodedResult]]]


class PullFailed(TrainingError):
    """The user's `pull` raised for a key; None: it is not known for which. The updates that it may come from are given
    to `pull` again, each by itself, and refused if they raise then. The others of the batch are, together."""

    def __init__(self, key: Key | None, reason: str) -> None:
        super().__init__(reason)
        self.key = key
        self.reason = reason


class ScriptGone(TrainingError):
    """No script with a `pull` is attached, or it has ended: the updates wait for one."""


class UpdateFailed(TrainingError):
    """An update was refused for ever, and is not in the value. `key` and `node` (hex) say which and where."""

    def __init__(self, key: Key, node: str, reason: str) -> None:
        super().__init__(f"the update of {key!r} failed at node {node}: {reason}")
        self.key = key
        self.node = node
        self.reason = reason


class StoreUnavailable(TrainingError):
    """No living node answered for a key in time. What an update did is unknown; it is not tried again."""
