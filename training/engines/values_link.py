"""The values of a run, as a script uses them: encodes keys and values, and asks the daemon."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

from p2pnode.training.engines.link import EngineLink
from p2pnode.training.engines.program import Context, VerbFailed, summary
from p2pnode.training.errors import TrainingError
from p2pnode.training.trainer_link.engine_messages import (
    MESSAGE_VALUES_BYTES,
    ApplyUpdates,
    AskKeys,
    Encoded,
    EngineReady,
    GetValues,
    KeysFound,
    ListPeers,
    PeerSteps,
    PullAsked,
    PullDone,
    Question,
    Reply,
    UpdateParts,
    ValuesFound,
)
from p2pnode.training.values.encoding import Key, decode_key, decode_value, encode_key, encode_value
from p2pnode.training.values.store import NewValue, Stamped, ValueUpdate

Result = TypeVar("Result")

_LOG = logging.getLogger("p2pnode.engine")


class Script:
    """What a program's context can use, the store of the engines' loops, and the node of the peer engine's loop. No
    method suspends. Those of values raise `InvalidKey`, `NoNode`, and `StoreUnavailable` when no owner answers in time.
    """

    def __init__(self, link: EngineLink, ready: EngineReady) -> None:
        self._link = link
        self._pause_s = ready.pause_s
        self.node_id = ready.node_id.hex()
        self.rng = random.Random(ready.seed)
        #: Whether the barrier of the settings is bsp.
        self.is_synchronous = ready.is_synchronous

    @property
    def is_stopping(self) -> bool:
        """Whether the node leaves."""
        return self._link.is_stopping

    async def ask(self, question: Question) -> Reply:
        """The daemon's answer."""
        return self._link.ask(question)

    async def pause(self) -> None:
        """Wait between two tests of a barrier of the program."""
        time.sleep(self._pause_s)  # noqa: ASYNC251 - there is no event loop

    async def get_many(self, keys: Sequence[Key]) -> dict[Key, Stamped]:
        """The values of those keys that have one, with their timestamps."""
        wanted = [encode_key(key) for key in keys]
        found: list[Encoded | None] = []
        while len(found) < len(wanted):
            reply = self._link.ask(GetValues(wanted[len(found) :]))
            assert isinstance(reply, ValuesFound)
            found += reply.values
        return {key: stamped(one) for key, one in zip(keys, found, strict=True) if one is not None}

    async def update(self, updates: Sequence[ValueUpdate]) -> None:
        """Apply updates, each exactly once; returns when all are stored and replicated. Raises `ValueNotEncodable`
        before any is sent, and `UpdateFailed` for the first that was refused when all have their answers."""
        encoded = [
            (encode_key(one.key), encode_value(one.key, one.value), one.timestamp, one.reducer) for one in updates
        ]
        self._link.ask_all([ApplyUpdates(part) for part in in_parts(encoded)])

    def get(self, key: Key) -> Stamped | None:
        """The value of a key; None for one that was never set."""
        return immediate(self.get_many([key])).get(key)

    def set(self, key: Key, value: object, timestamp: int) -> None:
        """Replace a value; returns when its owner and backup have it. Raises `ValueNotEncodable`."""
        immediate(self.update([ValueUpdate(key, value, timestamp, "replace")]))

    def keys(self) -> list[Key]:
        """All keys, sorted by their encoding: text first."""
        found: list[bytes] = []
        while True:
            reply = self._link.ask(AskKeys(found[-1] if found else b""))
            assert isinstance(reply, KeysFound)
            found += reply.keys
            if reply.is_last:
                return [decode_key(key) for key in found]

    def clock(self) -> float:
        return time.monotonic()

    def peers(self, count: int | None) -> dict[str, int]:
        return {node.hex(): step for node, step in self._asked(count or 0).steps.items()}

    def worker_num(self) -> int:
        return self._asked(0).workers

    def _asked(self, sample: int) -> PeerSteps:
        reply = self._link.ask(ListPeers(sample))
        assert isinstance(reply, PeerSteps)
        return reply


class ScriptEngine:
    """What the engines of named values have in common. Close one, or use it in a `with` block."""

    def __init__(self, link: EngineLink, ready: EngineReady) -> None:
        self._link = link
        self._script = Script(link, ready)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the node; it hands its values over when the script ends."""
        self._link.close()

    def get(self, key: Key, default: object = ...) -> Stamped:
        """A value and its timestamp; `default` with timestamp 0 where there is none. Raises `NoSuchValue`."""
        return Context(self._script, 0).get(key, default)

    def keys(self) -> list[Key]:
        """All keys of the run."""
        return self._script.keys()

    @property
    def node_id(self) -> str:
        """This node's id, in hexadecimal."""
        return self._script.node_id


#: Runs the program's `pull` on updates and the present values of their keys.
RunPull = Callable[[Sequence[ValueUpdate], Mapping[Key, Stamped]], Sequence[NewValue]]


def answer_pull(asked: PullAsked, pull: RunPull) -> PullDone:
    """Run `pull` on a batch. What it raises becomes the text of a failure; the owner then asks for its updates one by
    one, so that only those are refused that raise by themselves."""
    updates = [
        ValueUpdate(decode_key(key), decode_value(value), timestamp, reducer)
        for key, value, timestamp, reducer in asked.updates
    ]
    present = {decode_key(key): stamped(one) for key, one in asked.present.items()}
    try:
        return PullDone(asked.number, _encoded(pull(updates, present)))
    except Exception as error:
        keys = {one.key for one in updates}
        cause = _cause_of(error)
        if cause and len(updates) == 1:  # otherwise it is called again, for each by itself
            _LOG.warning("pull failed for %r:\n%s", updates[0].key, cause)
        return PullDone(asked.number, {}, _text_of(error), encode_key(updates[0].key) if len(keys) == 1 else b"")


def _encoded(values: Iterable[NewValue]) -> dict[bytes, Encoded]:
    return {encode_key(one.key): (encode_value(one.key, one.value), one.timestamp) for one in values}


def _cause_of(error: Exception) -> str:
    """The traceback of the user's `pull`; empty where the error is none of it."""
    failed = error if isinstance(error, VerbFailed) else error.__cause__
    return failed.cause if isinstance(failed, VerbFailed) else ""


def _text_of(error: Exception) -> str:
    """For the sender of the update, whose error names the key and this node itself."""
    if isinstance(error, VerbFailed):
        return f"{error.verb} failed: {summary(error.cause)}"
    return str(error) if isinstance(error, TrainingError) else f"{type(error).__name__}: {error}"


def stamped(encoded: Encoded) -> Stamped:
    """A decoded value and its timestamp."""
    return Stamped(decode_value(encoded[0]), encoded[1])


def in_parts(updates: Iterable[UpdateParts]) -> list[list[UpdateParts]]:
    """Updates in messages of about a megabyte."""
    parts: list[list[UpdateParts]] = []
    size_bytes = MESSAGE_VALUES_BYTES
    for one in updates:
        if size_bytes >= MESSAGE_VALUES_BYTES:
            parts.append([])
            size_bytes = 0
        parts[-1].append(one)
        size_bytes += len(one[0]) + len(one[1])
    return parts


def immediate(work: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration as done:
        found: Result = done.value
        return found
    work.close()
    raise RuntimeError("a coroutine that never suspends was expected")
