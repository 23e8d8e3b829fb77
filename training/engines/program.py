"""A user's program for an engine of named values: the verbs schedule, push, pull, barrier and stop, and their context.

A program is a subclass of `Program`, or functions that are registered one by one (`Verbs`). An error in one of them
becomes a `VerbFailed`, which names the verb, the keys, the node and the step. The verbs are those of Owl's Actor system
(Wang, Catterall and Mortier 2017; docs/engines.md). `pull` is the reducer of updates, not a fetch. Pure.
"""

from __future__ import annotations

import random
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from p2pnode.training.errors import TrainingError
from p2pnode.training.values.encoding import InvalidKey, Key, ValueNotEncodable
from p2pnode.training.values.reducers import BUILT_IN, Reducer
from p2pnode.training.values.store import NewValue, Stamped, ValueUpdate

Result = TypeVar("Result")
#: So many keys are named in an error.
SHOWN_KEYS = 3
#: A frame of a traceback, and what tells that it is not of the user's own code: it calls a verb, or was called by it.
_FRAME = re.compile(r'^  File "([^"<]+)", line (\d+)', re.MULTILINE)
_NOT_USERS = re.compile(
    r"/site-packages/|/lib/python3|/training/(engines|values)/(server/)?(program|reducers|encoding)\.py$"
)

#: What `push` gets and returns: a key with its value, or with an update of it.
Pairs = Iterable[tuple[Key, Any]]
#: What `pull` returns: a key, its new value, and its new timestamp.
Results = Iterable[tuple[Key, Any, int]]


class NoSuchValue(TrainingError, KeyError):
    """A key has no value: nothing was ever stored under it."""

    def __init__(self, key: Key) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return f"the key {self.key!r} has no value; set it first, or give `get` a default"


class VerbFailed(TrainingError):
    """A function of the user raised, or returned what cannot be used. `verb` is its role, `keys` are those it was
    called for, `node` (hex) and `step` say where and when, `cause` is the traceback. The engine stays usable."""

    def __init__(self, verb: str, keys: Sequence[Key], node: str, step: int, cause: str) -> None:
        self.verb, self.keys, self.node, self.step, self.cause = verb, tuple(keys), node, step, cause
        named = shown_keys(keys)
        what = f"{verb}{' of ' + named if named else ''}"
        super().__init__(f"{what} failed at node {node[:8]} in step {step}: {summary(cause)}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.verb, self.keys, self.node, self.step, self.cause)


class Surroundings(Protocol):
    """What a verb can use, from the thread that calls it."""

    @property
    def node_id(self) -> str: ...

    @property
    def rng(self) -> random.Random: ...

    def clock(self) -> float: ...

    def get(self, key: Key) -> Stamped | None: ...

    def set(self, key: Key, value: object, timestamp: int) -> None: ...

    def keys(self) -> list[Key]: ...

    def peers(self, count: int | None) -> dict[str, int]: ...

    def worker_num(self) -> int: ...


class Context:
    """What every verb gets first. `step` is the number of steps that this node has completed."""

    def __init__(self, surroundings: Surroundings, step: int) -> None:
        self._surroundings = surroundings
        self.step = step

    @property
    def node_id(self) -> str:
        """This node's id, in hexadecimal."""
        return self._surroundings.node_id

    @property
    def rng(self) -> random.Random:
        """Random numbers of this node: another sequence at each node and in each start of it."""
        return self._surroundings.rng

    def clock(self) -> float:
        """Monotonic seconds."""
        return self._surroundings.clock()

    def peers(self, sample: int | None = None) -> dict[str, int]:
        """Completed steps of other live nodes that take part, by id: of all, or of a fresh uniform sample. A barrier of
        one's own decides with them."""
        return self._surroundings.peers(sample)

    @property
    def worker_num(self) -> int:
        """How many live nodes take part, this one included."""
        return self._surroundings.worker_num()

    def get(self, key: Key, default: object = ...) -> Stamped:
        """A value and its timestamp; `default` with timestamp 0 where there is none. In `pull` a key of the batch is
        read without a request. Raises `NoSuchValue`."""
        found = self._surroundings.get(key)
        if found is not None:
            return found
        if default is ...:
            raise NoSuchValue(key)
        return Stamped(default, 0)

    def set(self, key: Key, value: object) -> None:
        """Replace a value; its timestamp is `step`. Raises `ValueNotEncodable`."""
        self._surroundings.set(key, value, self.step)

    def keys(self) -> list[Key]:
        """All keys of the run."""
        return self._surroundings.keys()


class Pulling:
    """The surroundings of `pull`: values of its `batch` are read without a request, and none is set."""

    def __init__(self, present: Mapping[Key, Stamped], surroundings: Surroundings, batch: Collection[Key] = ()) -> None:
        self._present = present
        self._batch = frozenset(batch)
        self._surroundings = surroundings
        self.node_id = surroundings.node_id
        self.rng = surroundings.rng
        self.clock = surroundings.clock
        self.keys = surroundings.keys
        self.peers = surroundings.peers
        self.worker_num = surroundings.worker_num

    def get(self, key: Key) -> Stamped | None:
        found = self._present.get(key)
        return found if found is not None or key in self._batch else self._surroundings.get(key)

    def set(self, key: Key, _value: object, _timestamp: int) -> None:
        raise TypeError(f"pull returns new values; it does not set {key!r}")


class Program:
    """A program: override what it needs. The defaults schedule and push nothing, keep the last update, use the barrier
    of the node's settings, and never stop.

    `reducer` instead of `pull`: "add" adds updates to the value (numbers and arrays), "replace" keeps the last one.
    Both run in the daemon, so an owner needs no script for them.
    """

    reducer: Reducer = "replace"

    def schedule(self, ctx: Context) -> Iterable[Key]:  # noqa: ARG002 - a default
        """The keys to compute in this step. Runs at the node that computes."""
        return ()

    def push(self, ctx: Context, params: list[tuple[Key, Any]]) -> Pairs:  # noqa: ARG002 - a default
        """Updates, computed from the values of the scheduled keys; a key without a value comes with None. Runs at the
        node that computes."""
        return ()

    def pull(self, ctx: Context, updates: Sequence[ValueUpdate]) -> Results:  # noqa: ARG002 - a default
        """New values of the keys of a batch: `update.key`, `update.value`, and the sender's step `update.timestamp`.
        A key may come several times, and a batch is any part of the updates under way. Runs at the owner of the keys,
        one batch of a key at a time."""
        return [(one.key, one.value, one.timestamp) for one in updates]

    def barrier(self, ctx: Context) -> bool:  # noqa: ARG002 - a default
        """Whether this node may go on; asked again and again. Overridden, it replaces the barrier of the settings."""
        return True

    def stop(self, ctx: Context) -> bool:  # noqa: ARG002 - a default
        """Whether this node has done its part. Asked before each step."""
        return False


Schedule = TypeVar("Schedule", bound=Callable[[Context], Iterable[Key]])
Push = TypeVar("Push", bound=Callable[[Context, list[tuple[Key, Any]]], Pairs])
PullVerb = TypeVar("PullVerb", bound=Callable[[Context, Sequence[ValueUpdate]], Results] | Reducer)
BarrierVerb = TypeVar("BarrierVerb", bound=Callable[[Context], bool])
Stop = TypeVar("Stop", bound=Callable[[Context], bool])


class Verbs:
    """The functions of one program. Each `register_…` is a decorator too, and returns its function."""

    #: Its methods are the defaults.
    defaults: type[Any] = Program

    def __init__(self) -> None:
        self._program = self.defaults()
        self.barrier: Callable[[Context], bool] | None = None
        self.reducer: Reducer = "replace"
        self._named: dict[str, Callable[..., Any]] = {}

    def use(self, program: Any) -> None:
        """Take all verbs from a program; what was registered before is forgotten."""
        self._program = program
        self._named.clear()
        self.barrier = None if type(program).barrier is self.defaults.barrier else program.barrier
        self.reducer = program.reducer if type(program).pull is self.defaults.pull else "pull"

    def register_schedule(self, function: Schedule) -> Schedule:
        """Use `function(ctx) -> keys` as `schedule`."""
        return self._register("schedule", function)

    def register_push(self, function: Push) -> Push:
        """Use `function(ctx, params) -> updates` as `push`."""
        return self._register("push", function)

    def register_pull(self, function: PullVerb) -> PullVerb:
        """Use `function(ctx, updates) -> results` as `pull`; "add" and "replace" name those that every node has."""
        if isinstance(function, str):
            if function not in BUILT_IN:
                raise ValueError(f"pull is a function or one of {', '.join(BUILT_IN)}, not {function!r}")
            self.reducer = function
            return function
        self.reducer = "pull"
        return self._register("pull", function)

    def register_barrier(self, function: BarrierVerb) -> BarrierVerb:
        """Use `function(ctx) -> bool` instead of the barrier of the settings."""
        self.barrier = self._register("barrier", function)
        return function

    def register_stop(self, function: Stop) -> Stop:
        """Use `function(ctx) -> bool` as `stop`."""
        return self._register("stop", function)

    def _register(self, verb: str, function: Result) -> Result:
        if not callable(function):
            raise TypeError(f"{verb} has to be a function, not {type(function).__name__}")
        self._named[verb] = function
        return function

    def _verb(self, verb: str) -> Callable[..., Any]:
        found: Callable[..., Any] = self._named.get(verb) or getattr(self._program, verb)
        return found

    # -- calls, with their results checked

    def scheduled(self, ctx: Context) -> list[Key]:
        """What `schedule` returns, each key once. Raises `VerbFailed`."""

        def keys() -> list[Key]:
            found = self._verb("schedule")(ctx)
            if isinstance(found, str | bytes):
                raise TypeError(f"it returned the key {found!r} instead of a list of keys")
            return list(dict.fromkeys(_key(key) for key in found))

        return called("schedule", (), ctx, keys)

    def pushed(self, ctx: Context, params: list[tuple[Key, Any]]) -> list[ValueUpdate]:
        """What `push` returns, as updates of this step. Raises `VerbFailed`."""

        def updates() -> list[ValueUpdate]:
            found = [_parts(pair, 2, "(key, update)") for pair in self._verb("push")(ctx, params)]
            return [ValueUpdate(_key(key), update, ctx.step + 1, self.reducer) for key, update in found]

        return called("push", [key for key, _ in params], ctx, updates)

    def pulled(self, ctx: Context, updates: Sequence[ValueUpdate]) -> list[NewValue]:
        """What `pull` returns for a batch; only its keys may be in it. Raises `VerbFailed`."""
        keys = list(dict.fromkeys(one.key for one in updates))

        def results() -> list[NewValue]:
            found = [_parts(result, 3, "(key, value, timestamp)") for result in self._verb("pull")(ctx, updates)]
            if strange := [key for key, _, _ in found if key not in keys]:
                raise ValueError(f"it returned the key {strange[0]!r}, of which there is no update")
            return [NewValue(key, value, int(timestamp)) for key, value, timestamp in found]

        return called("pull", keys, ctx, results)

    def passes(self, ctx: Context) -> bool:
        """What a barrier of the program says. Raises `VerbFailed`."""
        return called("barrier", (), ctx, lambda: self.barrier is None or bool(self.barrier(ctx)))

    def stops(self, ctx: Context) -> bool:
        """What `stop` says. Raises `VerbFailed`."""
        return called("stop", (), ctx, lambda: bool(self._verb("stop")(ctx)))


def called(verb: str, keys: Sequence[Key], ctx: Context, function: Callable[[], Result]) -> Result:
    """The result of a user's function. What it raises becomes a `VerbFailed`; a failed request of this node, which the
    function made through its context, stays what it is unless it names a value that cannot be sent."""
    try:
        return function()
    except (InvalidKey, NoSuchValue, ValueNotEncodable) as error:
        raise verb_failed(verb, keys, ctx, error) from error
    except TrainingError:
        raise
    except Exception as error:
        raise verb_failed(verb, keys, ctx, error) from error


def verb_failed(verb: str, keys: Sequence[Key], ctx: Context, error: BaseException) -> VerbFailed:
    """The error of a verb, with its traceback."""
    return VerbFailed(verb, keys, ctx.node_id, ctx.step, "".join(traceback.format_exception(error)))


def summary(cause: str) -> str:
    """A traceback in one line: the error, and the place in the user's code that it comes from. It is all that reaches
    another node, so it has what is needed to find the fault."""
    lines = cause.strip().splitlines()
    places = [(Path(path).name, line) for path, line in _FRAME.findall(cause) if not _NOT_USERS.search(path)]
    last = lines[-1] if lines else "unknown"
    return f"{last} ({places[-1][0]}, line {places[-1][1]})" if places else last


def shown_keys(keys: Sequence[Key]) -> str:
    """Keys for an error, the first few of many."""
    named = ", ".join(repr(key) for key in keys[:SHOWN_KEYS])
    return f"{named} and {len(keys) - SHOWN_KEYS} more" if len(keys) > SHOWN_KEYS else named


def _key(key: object) -> Key:
    if not isinstance(key, str | bytes):
        raise TypeError(f"a key is str or bytes, not {type(key).__name__}: {key!r:.100}")
    return key


def _parts(found: object, count: int, what: str) -> tuple[Any, ...]:
    parts = tuple(found) if isinstance(found, tuple | list) else ()
    if len(parts) != count:
        raise TypeError(f"{what} was expected, not {found!r:.100}")
    return parts
