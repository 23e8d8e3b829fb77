"""A user's program for the parameter server: the verbs, what they get, and how `pull` is called.

`schedule` and `stop` run at the server, `push` at the workers, `pull` at the server that owns the keys: `ServerPull`
applies no update twice, and none of a server that another one has replaced. Every update of a commit has a timestamp of
its own, and the value of a key has that of its last one. A server that repeats the commit of a dead one sends the same
timestamps, so an owner knows which updates it has.

The record of the servers is a value like others, under `RECORD_KEY`. Its owner replaces it by one of the same server,
or by one of a higher epoch that counts more stored records. The count shows that the next server has read the last
one: a server that was taken for dead may have stored another meanwhile, and begun the commit that it names. A server
stores its record before each commit, so one that was replaced is refused there, before it has changed a value. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from p2pnode.training.engines.program import (
    Context,
    Pairs,
    Pulling,
    Results,
    Surroundings,
    VerbFailed,
    Verbs,
    called,
    summary,
    verb_failed,
)
from p2pnode.training.engines.server.record import RECORD_KEY, Failure, ServerReplaced, decode_record
from p2pnode.training.engines.server.tasks import MAX_KEYS, Work
from p2pnode.training.errors import TrainingError
from p2pnode.training.values.encoding import Key, decode_key, encode_key, encode_value
from p2pnode.training.values.reducers import Reducer, reduced
from p2pnode.training.values.store import NewValue, PullFailed, Stamped, ValueUpdate

#: A task: keys whose values the server sends along, and pairs (key, value) that come as they are.
TaskKeys = Iterable[Key | tuple[Key, Any]]


class ServerContext(Context):
    """What every verb gets first. `version` is the number of updates in the values. `step` is, at the server, the step
    that all workers have completed, and at a worker the one that its task completes. `steps` has the completed steps of
    all workers, by id; at the server only."""

    def __init__(
        self,
        surroundings: Surroundings,
        step: int,
        version: int = 0,
        steps: Mapping[str, int] | None = None,
        workers: int = 0,
    ) -> None:
        super().__init__(surroundings, step)
        self.version = version
        self.steps = dict(steps or {})
        self._workers = workers if steps is None else len(steps)

    @property
    def worker_num(self) -> int:
        """How many live workers there are; in `push`, as the server knew when it gave the task. 0 in `pull`."""
        return self._workers

    def keys(self) -> list[Key]:
        """All keys of the run."""
        found = super().keys()
        return [key for key in found if key != RECORD_KEY]

    def set(self, key: Key, value: object) -> None:
        """Replace a value; updates that are under way are made to the new one. Raises `ValueNotEncodable`."""
        set_value(self._surroundings, key, value, self.version)


class ServerProgram:
    """A program: override what it needs. The defaults give no tasks, keep the last update, and never stop.

    `reducer` instead of `pull`: "add" adds updates to the value (numbers and arrays), "replace" keeps the last one.
    """

    reducer: Reducer = "replace"

    def schedule(self, ctx: ServerContext, workers: list[str]) -> Mapping[str, TaskKeys]:
        """A task for each of the workers that have passed the barrier, or for some of them. Runs at the server."""
        return {}

    def push(self, ctx: ServerContext, params: list[tuple[Key, Any]]) -> Pairs:
        """Updates, computed from the values of a task; a key without a value comes with None. It may run again, for the
        same task with newer values, or at another worker. Runs at a worker."""
        return ()

    def pull(self, ctx: ServerContext, updates: Sequence[ValueUpdate]) -> Results:
        """New values of the keys of a batch. Runs at the server that owns the keys, one batch of a key at a time. The
        engine decides the timestamps; the third part of a result is not used."""
        return [(one.key, one.value, one.timestamp) for one in updates]

    def barrier(self, ctx: ServerContext, idle: list[str]) -> Iterable[str]:
        """Which of the idle workers may begin their next step. Overridden, it replaces the barrier of `start`."""
        return idle

    def stop(self, ctx: ServerContext) -> bool:
        """Whether the run is over. Asked at the server before each schedule; open tasks are completed."""
        return False


class ServerVerbs(Verbs):
    """The functions of one program. Each `register_…` is a decorator too, and returns its function."""

    defaults = ServerProgram

    def register_schedule(self, function: Callable[..., Any]) -> Any:
        """Use `function(ctx, workers) -> {worker: keys}` as `schedule`."""
        return self._register("schedule", function)

    def register_barrier(self, function: Callable[..., Any]) -> Any:
        """Use `function(ctx, idle) -> workers` instead of the barrier of `start`."""
        self.barrier = self._register("barrier", function)
        return function

    # -- calls, with their results checked

    def assigned(self, ctx: ServerContext, workers: list[str]) -> dict[str, Work]:
        """What `schedule` returns, by worker; tasks without a key are left out. Raises `VerbFailed`."""

        def tasks() -> dict[str, Work]:
            found = self._verb("schedule")(ctx, list(workers))
            if not isinstance(found, Mapping):
                raise TypeError(f"it returned a {type(found).__name__} instead of {{worker: keys}}")
            if strange := [worker for worker in found if worker not in workers]:
                raise ValueError(f"it gives a task to {strange[0]!r:.80}, which has not passed")
            return {worker: work for worker, keys in found.items() if (work := _work_of(keys))}

        return called("schedule", (), ctx, tasks)

    def allowed(self, ctx: ServerContext, idle: list[str]) -> list[str]:
        """What a barrier of the program lets pass. Raises `VerbFailed`."""
        barrier: Any = self.barrier

        def workers() -> list[str]:
            found = list(barrier(ctx, list(idle)))
            if strange := [worker for worker in found if worker not in idle and worker not in ctx.steps]:
                raise ValueError(f"it lets {strange[0]!r:.80} pass, which is no worker")
            return [worker for worker in idle if worker in found]

        return called("barrier", (), ctx, workers)


def _work_of(keys: TaskKeys) -> Work:
    if isinstance(keys, str | bytes):
        raise TypeError(f"a task is a list of keys, not the key {keys!r:.80}")
    work: Work = []
    for one in keys:
        key, value = one if isinstance(one, tuple) and len(one) == 2 else (one, None)
        work.append((encode_key(key), encode_value(key, value) if isinstance(one, tuple) else None))
    if len(work) > MAX_KEYS:
        raise ValueError(f"a task has {len(work):,} keys, and at most {MAX_KEYS:,} are allowed: make smaller tasks")
    return work


def set_value(surroundings: Surroundings, key: Key, value: object, version: int) -> None:
    """Replace a value. Its timestamp is no lower than that of the former value: it tells which updates are in it."""
    if key == RECORD_KEY:
        raise ValueError(f"the key {key!r} belongs to the engine")
    former: Stamped | None = surroundings.get(key)
    surroundings.set(key, value, max(version, 0 if former is None else former.timestamp))


class ServerPull:
    """The `pull` of one server. `surroundings` are those of the program's context."""

    def __init__(self, verbs: ServerVerbs, surroundings: Surroundings) -> None:
        self._verbs = verbs
        self._surroundings = surroundings

    def apply(self, updates: Sequence[ValueUpdate], present: Mapping[Key, Stamped]) -> list[NewValue]:
        """The new values of a batch. Raises `PullFailed`, which names the key."""
        found = []
        record = present.get(RECORD_KEY)
        for one in updates:
            if one.key == RECORD_KEY:
                record = Stamped(replaced_record(one, record), one.timestamp)
                found.append(NewValue(RECORD_KEY, *record))
        fresh = not_yet_applied([one for one in updates if one.key != RECORD_KEY], present)
        return [*found, *self._pulled(fresh, present)] if fresh else found

    def _pulled(self, fresh: list[ValueUpdate], present: Mapping[Key, Stamped]) -> list[NewValue]:
        stamps = {one.key: one.timestamp for one in sorted(fresh, key=lambda one: one.timestamp)}
        try:
            found = self._reduced(fresh, present) if self._verbs.reducer != "pull" else self._called(fresh, present)
        except VerbFailed as error:
            if len(stamps) == 1:
                raise PullFailed(next(iter(stamps)), summary(error.cause)) from error
            alone = [[update for update in fresh if update.key == key] for key in stamps]
            return [one for updates in alone for one in self._pulled(updates, present)]
        # A key that the program leaves out keeps its value, but it has the update.
        return [NewValue(one.key, one.value, stamps[one.key]) for one in found]

    def _called(self, fresh: list[ValueUpdate], present: Mapping[Key, Stamped]) -> list[NewValue]:
        version = max(one.timestamp for one in fresh)
        return self._verbs.pulled(ServerContext(Pulling(present, self._surroundings), 0, version), fresh)

    def _reduced(self, fresh: list[ValueUpdate], present: Mapping[Key, Stamped]) -> list[NewValue]:
        """What a built-in reducer makes of the updates. It runs here and not in the daemon, which does not know which
        updates of a repeated commit a value has."""
        values = {key: one.value for key, one in present.items()}
        ctx = ServerContext(self._surroundings, 0)
        for one in fresh:
            try:
                values[one.key] = reduced(self._verbs.reducer, values.get(one.key), one.value)
            except (TypeError, ValueError) as error:
                raise verb_failed("pull", [one.key], ctx, error) from error
        return [NewValue(key, values[key], 0) for key in dict.fromkeys(one.key for one in fresh)]


def not_yet_applied(updates: Sequence[ValueUpdate], present: Mapping[Key, Stamped]) -> list[ValueUpdate]:
    """The updates that the values of their keys do not have."""
    return [one for one in updates if one.key not in present or one.timestamp > present[one.key].timestamp]


def replaced_record(update: ValueUpdate, present: Stamped | None) -> object:
    """The record after a server stored its own. Raises `PullFailed` for that of a server that was replaced."""
    mine = decode_record(Stamped(update.value, 0))
    theirs = decode_record(present)
    is_older = mine.epoch < theirs.epoch or (mine.epoch == theirs.epoch and mine.server != theirs.server)
    if is_older or (mine.epoch > theirs.epoch and mine.stored <= theirs.stored):
        raise PullFailed(RECORD_KEY, str(ServerReplaced(theirs)))
    return update.value


class UpdatesLost(TrainingError):
    """The run ended, and some of its updates are in no value, or in some of theirs only: the worker that had computed
    them died, or began anew, together with the server. `count` is how many there are, `version` that of the values. The
    values can be used, and `start` be called again."""

    def __init__(self, count: int, version: int) -> None:
        self.count, self.version = count, version
        super().__init__(
            f"the run ended at version {version}, and {count} update{'s' if count > 1 else ''} may be missing in its "
            "values: their workers died, or began anew, together with the server. Use the values as they are, or set "
            "them and call `start` again"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.count, self.version)


def raise_end(failure: Failure | None, lost: int, version: int) -> None:
    """Raise what a run ended with, unless all is well. Raises `VerbFailed` or `UpdatesLost`."""
    if failure is not None:
        keys = [decode_key(key) for key in failure.keys]
        raise VerbFailed(failure.verb, keys, failure.node, failure.step, failure.cause)
    if lost:
        raise UpdatesLost(lost, version)
