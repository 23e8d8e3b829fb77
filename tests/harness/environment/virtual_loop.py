"""An event loop whose time is virtual: it jumps to the next timer whenever nothing is ready to run.

A virtual second costs nothing. The same program gives the same order of callbacks under any `PYTHONHASHSEED`. A program
that cannot continue raises a `Deadlock` that names its tasks, and an unhandled exception ends the run. The loop never
waits, reads no socket and starts no thread.

One loop runs all hosts of a world. Code that runs in a context where `OWNER` is set belongs to that host, and so do the
tasks and timers it makes. `stall` delays these alone, as a busy loop would.

`_run_once` is replaced: where asyncio waits for the next timer, the clock jumps to it. A history has millions of turns
and handles, so both are made with as few calls as asyncio allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import heapq
import selectors
from collections.abc import Coroutine, Hashable, Iterator
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar
from weakref import ref

T = TypeVar("T")

#: The host whose code this is; None: the test's own.
OWNER: ContextVar[Hashable] = ContextVar("OWNER", default=None)

#: Virtual seconds at the start. Not zero, as no machine's monotonic clock is: `last = 0.0` must look long ago.
START_S = 1000.0
#: Timers closer than this are of one moment: sums of floats drift apart where they mean the same.
RESOLUTION_S = 1e-9
#: Loop turns without progress of the clock after which the run counts as spinning. 200 nodes do thousands.
SPIN_TURNS = 2_000_000
#: Loop turns between two collections of garbage. Fixed, because finalisers schedule callbacks: collections at the
#: interpreter's own moments would make the history depend on how many objects happen to be allocated.
COLLECT_TURNS = 400_000
#: Tasks that are noted before those that have ended are looked for.
MOST_TASKS = 1000


@functools.cache
def _is_frozen() -> bool:
    """Whether objects were frozen before the first run of this process. Asked once: counting them passes them all."""
    return gc.get_freeze_count() > 0


class Deadlock(Exception):
    """The program waits, and nothing is scheduled that could wake it. The message names the tasks."""


class TimeLimit(Exception):
    """The program had not ended after `limit_s` virtual seconds. The message names the tasks."""


class Unhandled(Exception):
    """Exceptions that no code handled: in tasks never awaited, callbacks, or handlers of the simulated world."""

    def __init__(self, contexts: list[dict[str, Any]]) -> None:
        lines = [f"{context.get('message', '')}: {context.get('exception')!r}" for context in contexts]
        super().__init__("; ".join(lines))
        self.contexts = contexts


class _VirtualTask(asyncio.Task[Any]):
    """A task whose hash is its number. Sets of tasks (TaskGroup, `asyncio.wait`, `self._tasks`) then iterate in an
    order that depends on the program only, not on addresses in memory."""

    __slots__ = ("number",)

    def __hash__(self) -> int:
        return self.number


def register_of_tasks() -> Any:
    """The weak set of tasks that `asyncio.all_tasks` reads; Python 3.12 has another name for it than 3.11."""
    return vars(asyncio.tasks).get("_scheduled_tasks", vars(asyncio.tasks).get("_all_tasks"))


class _Tasks(list["ref[asyncio.Task[Any]]"]):
    """What asyncio's register of tasks holds while a loop runs. `asyncio.all_tasks` reads it.

    The register calls functions of Python when a task begins and when it ends. A history has hundreds of thousands of
    tasks, and most of them end before anybody asks for them: here those that have ended are dropped now and then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._register: Any = register_of_tasks()
        self._others = self._register.data
        self._most = MOST_TASKS

    def note(self, task: asyncio.Task[Any]) -> None:
        self.append(ref(task))
        if len(self) > self._most:
            self[:] = [one for one in self if (known := one()) is not None and not known.done()]
            self._most = max(MOST_TASKS, 2 * len(self))

    def discard(self, reference: ref[asyncio.Task[Any]]) -> None:
        """A task of an earlier loop is no more."""
        self._others.discard(reference)

    @contextlib.contextmanager
    def instead(self) -> Iterator[None]:
        self._register.data, self._register.add = self, self.note
        try:
            yield
        finally:
            self._register.data = self._others
            del self._register.add


class _Ready(asyncio.Handle):
    """As asyncio's, without its question whether the loop is debugged."""

    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: asyncio.AbstractEventLoop, context: Context | None) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = self._source_traceback = None

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = self._args = None


class _Timer(asyncio.TimerHandle):
    """Likewise. The loop drops a cancelled one when its time comes."""

    __slots__ = ()

    def __init__(
        self, when: float, callback: Any, args: Any, loop: asyncio.AbstractEventLoop, context: Context | None
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = self._source_traceback = None
        self._when = when
        self._scheduled = True

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = self._args = None


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop of the simulated tier. `run` once, then it is closed."""

    def __init__(self) -> None:
        self._now = START_S
        self._limit = float("inf")
        self._turns = 0
        self._turns_at_jump = 0
        self._tasks_made = 0
        self._failures: list[dict[str, Any]] = []
        self._timers: list[tuple[float, int, _Timer]] = []
        self._timers_made = 0
        self._stalls: dict[Hashable, float] = {}
        super().__init__(selectors.SelectSelector())
        self.set_exception_handler(VirtualLoop._record)

    def time(self) -> float:
        return self._now

    @property
    def elapsed_s(self) -> float:
        """Virtual seconds since the start of the loop."""
        return self._now - START_S

    @property
    def turns(self) -> int:
        """Turns of the loop so far: equal for equal histories."""
        return self._turns

    def _write_to_self(self) -> None:
        """There is no thread to be woken from: spare the system call."""

    def stall(self, owner: Hashable, seconds: float) -> None:
        """Nothing of this owner runs until `seconds` from now; then all that came up meanwhile, in its order."""
        self._stalls = {other: until for other, until in self._stalls.items() if until > self._now}
        self._stalls[owner] = max(self._now + seconds, self._stalls.get(owner, 0.0))

    def _is_stalled(self, handle: asyncio.Handle) -> bool:
        """Whether the handle has to wait; if so it is scheduled for the end of the stall."""
        until = self._stalls.get(handle._context.get(OWNER), 0.0)
        if until <= self._now:
            return False
        # In a context of its own: one that is entered cannot be entered by what runs inside it.
        self.call_at(until, self._run_late, handle, context=Context())
        return True

    def _run_late(self, handle: asyncio.Handle) -> None:
        if not handle.cancelled() and not self._is_stalled(handle):
            handle._run()

    def create_task(self, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
        self._tasks_made += 1
        task = _VirtualTask(coro, loop=self, **kwargs)
        task.number = self._tasks_made
        return task

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = _Ready(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        timer = _Timer(when := self._now + delay, callback, args, self, context)
        self._timers_made += 1
        heapq.heappush(self._timers, (when, self._timers_made, timer))
        return timer

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        """With a heap of tuples: compared in C, and timers of one moment keep their order."""
        timer = _Timer(when, callback, args, self, context)
        self._timers_made += 1
        heapq.heappush(self._timers, (when, self._timers_made, timer))
        return timer

    def _run_once(self) -> None:
        """Turns until the loop is stopped: jump to the next timer if nothing is ready, then run what is."""
        ready, timers = self._ready, self._timers
        while True:
            self._turns += 1
            if self._turns % COLLECT_TURNS == 0:
                gc.collect(1)
            if not ready and not self._stopping:
                self._jump()
            elif self._turns - self._turns_at_jump > SPIN_TURNS:
                raise TimeLimit(f"{SPIN_TURNS} turns of the loop in no time at all; {self._pending()}")
            moment = self._now + RESOLUTION_S
            while timers and timers[0][0] <= moment:
                ready.append(heapq.heappop(timers)[2])
            for _ in range(len(ready)):
                handle = ready.popleft()
                if handle._cancelled or (self._stalls and self._is_stalled(handle)):
                    continue
                try:
                    # What `Handle._run` does, without a call of it.
                    handle._context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    message = f"Exception in callback {handle._callback!r}"
                    self.call_exception_handler({"message": message, "exception": error, "handle": handle})
            if self._stopping:
                return

    def _jump(self) -> None:
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise Deadlock(f"nothing is ready and nothing is scheduled; {self._pending()}")
        self._now = max(self._now, timers[0][0])
        self._turns_at_jump = self._turns
        if self._now > self._limit:
            limit_s = self._limit - START_S
            raise TimeLimit(f"not finished after {limit_s:.0f} virtual seconds; {self._pending()}")

    def _pending(self) -> str:
        tasks = self._living()
        lines = [_describe(task) for task in tasks[:20]]
        return f"{len(tasks)} pending tasks: " + "; ".join(lines)

    def _living(self) -> list[asyncio.Task[Any]]:
        return sorted(asyncio.all_tasks(self), key=hash)

    @staticmethod
    def _record(loop: Any, context: dict[str, Any]) -> None:
        loop._failures.append(context)
        loop.stop()

    def run(self, coroutine: Coroutine[Any, Any, T], *, limit_s: float = 3600.0, strict: bool = False) -> T:
        """Run to the end and close the loop.

        Raises what the coroutine raises; `Unhandled` at the first exception that no code handled; `Deadlock`;
        `TimeLimit` after `limit_s` virtual seconds. With `strict`, tasks that are left over at the end are `Unhandled`
        too.
        """
        with _Tasks().instead():
            return self._run(coroutine, limit_s, strict=strict)

    def _run(self, coroutine: Coroutine[Any, Any, T], limit_s: float, *, strict: bool) -> T:
        self._limit = self._now + limit_s
        collecting, is_frozen = gc.isenabled(), _is_frozen()
        if is_frozen:
            # The world of the last run, which the next freeze would keep for ever. Little else is not frozen.
            gc.collect()
        # What was there before is left alone, garbage too: looking through it costs more than most histories.
        gc.freeze()
        gc.disable()
        task = self.create_task(coroutine, name="main")
        try:
            try:
                result = self.run_until_complete(task)
            except RuntimeError:
                if not self._failures:
                    raise
                raise Unhandled(self._failures) from _cause(self._failures)
            finally:
                # `strict` blames only a run that otherwise went well.
                left = self._living()
                self._end(left)
            if strict and left:
                self._failures.append({"message": "left over", "exception": [_describe(task) for task in left]})
            if self._failures:
                raise Unhandled(self._failures) from _cause(self._failures)
            return result
        finally:
            # Frozen by the tests already (tests/conftest.py): each later collection would look through it all.
            if not is_frozen:
                gc.unfreeze()
            if collecting:
                gc.enable()
            # This loop is frozen too: what it still refers to would never be collected.
            self._timers.clear()
            self._stalls.clear()
            self.close()

    def _end(self, left: list[asyncio.Task[Any]]) -> None:
        """Cancel what is left over and let it clean up, so that nothing complains when it is collected."""
        self._limit = self._now + 60.0
        for task in left:
            task.cancel()
        while any(not task.done() for task in left):
            try:
                self.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            except RuntimeError:  # stopped by `_record`: the rest continues
                continue
            except (Deadlock, TimeLimit) as error:
                self._failures.append({"message": "a cancelled task does not end", "exception": error})
                break
        gc.collect()
        # Now that it is collected: "exception was never retrieved" arrives through the exception handler.
        self.stop()
        self.run_forever()
        self.run_until_complete(self.shutdown_asyncgens())


def _cause(failures: list[dict[str, Any]]) -> BaseException | None:
    cause = failures[0].get("exception")
    return cause if isinstance(cause, BaseException) else None


def _describe(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    where = f" at {frames[0].f_code.co_qualname}:{frames[0].f_lineno}" if frames else ""
    coroutine = task.get_coro()
    return f"{task.get_name()} {getattr(coroutine, '__qualname__', coroutine)}{where}"


def run(coroutine: Coroutine[Any, Any, T], *, limit_s: float = 3600.0, strict: bool = False) -> T:
    """Run a coroutine on a fresh `VirtualLoop`."""
    return VirtualLoop().run(coroutine, limit_s=limit_s, strict=strict)
