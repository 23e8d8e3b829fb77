"""Hands the steps of this node to the thread that writes them, and says so when they are not written.

The writer is opened again a minute after it failed. Steps of the time between are lost for the tracker, and counted.
Training does not notice: nothing here waits on the path of a step. A thread that hangs keeps no process from ending.

A step is a record of its row in `/steps`; the newest one has the metrics that the trainer reported as `train/NAME`. An
evaluation of the shared model is a record of its own, with the step of that model and the metrics as `eval/NAME`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from p2pnode.config.tracker import Tracker
from p2pnode.overlay.background_output import BackgroundOutput
from p2pnode.overlay.environment import Clock, Log
from p2pnode.tracking.writers import Record, TrackerWriter, open_writer
from p2pnode.training.progress import Progress, StepRow

POLL_INTERVAL_S = 0.5
#: Between a failure and the next try.
RETRY_S = 60.0
#: A write that takes so long is a problem: a disk or a library that hangs.
PATIENCE_S = 30.0
#: The imports of trackio take ten seconds on a slow machine.
START_PATIENCE_S = 120.0
#: At the end: time for the last records.
CLOSE_S = 10.0

#: Runs functions one after the other off the loop, and raises what they raise.
InThread = Callable[[Callable[[], None]], Awaitable[None]]


class StepFeed:
    """Remembers what was taken, so that each step and each evaluation is taken once."""

    def __init__(self) -> None:
        self._last: StepRow | None = None
        self._evaluated: tuple[int | None, Mapping[str, float]] = (None, {})

    def take(self, progress: Progress, wall_s: float, others: Mapping[str, float] = {}) -> list[Record]:
        """The records since the last call, oldest first. `others` are numbers of now, kept with the newest step."""
        rows: list[StepRow] = []
        for row in reversed(progress.steps):
            if row is self._last:
                break
            rows.append(row)
        records = [Record(row["step"], wall_s, _numbers(row)) for row in reversed(rows)]
        if rows:
            self._last = rows[0]
            records[-1].values.update({f"train/{name}": value for name, value in progress.training_metrics.items()})
            records[-1].values.update(others)
        evaluated = (progress.evaluated_step, dict(progress.evaluated_metrics))
        if progress.evaluated_step is not None and evaluated != self._evaluated:
            self._evaluated = evaluated
            values = {f"eval/{name}": value for name, value in progress.evaluated_metrics.items()}
            records.append(Record(progress.evaluated_step, wall_s, values))
        return records


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row; tables by reason or by node are left out."""
    return {
        name: value
        for name, value in row.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


class Writing(NamedTuple):
    """Where to write, and as whom: `run` of the swarm, `name` of this node."""

    tracker: Tracker
    folder: Path
    run: str
    name: str

    def open(self) -> TrackerWriter:
        """Raises whatever the writer's library raises."""
        return open_writer(self.tracker.kind, self.tracker.path(self.folder), self.run, self.name)


class WriterThread:
    """A daemon thread, which begins with the first function."""

    def __init__(self) -> None:
        self._output = BackgroundOutput(lambda _data: None)

    async def __call__(self, function: Callable[[], None]) -> None:
        """Run one function there. Raises what it raises."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle(error: Exception | None) -> None:
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)

        def work() -> None:
            error = None
            try:
                function()
            except Exception as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, error)

        self._output.call(work)
        await done


class Tracking:
    """`run` until cancelled, then `close`. `problem` is empty while records are written."""

    def __init__(
        self,
        writing: Writing,
        progress: Progress,
        *,
        clock: Clock,
        log: Log,
        others: Callable[[], Mapping[str, float]] = dict,
        in_thread: InThread | None = None,
    ) -> None:
        """`others` are further numbers of this node now, such as its peers."""
        self._writing = writing
        self._progress = progress
        self._clock = clock
        self._log = log
        self._others = others
        self._in_thread = WriterThread() if in_thread is None else in_thread
        self._feed = StepFeed()
        #: Used in the thread alone.
        self._writer: TrackerWriter | None = None
        self._fails_since_s: float | None = None
        self.problem = ""
        #: Records that were not written.
        self.lost = 0

    @property
    def name(self) -> str:
        """The setting that asks for it."""
        kind, place = self._writing.tracker
        return f"{kind}:{place}" if place else kind

    async def run(self) -> None:
        """Write until cancelled; failures are logged, and tried again."""
        while True:
            try:
                await self._patiently(self._open, START_PATIENCE_S)
                while True:
                    await asyncio.sleep(POLL_INTERVAL_S)
                    await self._write(self._taken())
            except Exception as error:  # whatever a writer's library raises
                self._failed(_said(error))
            await asyncio.sleep(RETRY_S)
            self.lost += len(self._taken())

    async def close(self) -> None:
        """Write what is left, for at most `CLOSE_S`. `run` must have ended before."""
        records = self._taken()
        # What the thread does not get to write in time is lost with the process.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSE_S):
                await self._in_thread(lambda: self._finish(records))

    async def _write(self, records: Sequence[Record]) -> None:
        if not records:
            return
        try:
            await self._patiently(lambda: self._put(records), PATIENCE_S)
        except Exception:
            self.lost += len(records)
            raise
        if self._fails_since_s is not None:
            after_s = round(self._clock.monotonic() - self._fails_since_s, 1)
            self._log.info("tracker_writes_again", tracker=self.name, after_s=after_s)
            self._fails_since_s, self.problem = None, ""

    async def _patiently(self, function: Callable[[], None], patience_s: float) -> None:
        """Wait for the thread, also when it takes too long: it cannot be ended, and what comes meanwhile is lost."""
        working = asyncio.ensure_future(self._in_thread(function))
        try:
            await asyncio.wait([working], timeout=patience_s)
            if not working.done():
                self._failed(f"it has written nothing for {patience_s:.0f} s")
                await asyncio.wait([working])
                self.lost += len(self._taken())
            working.result()
        finally:
            working.cancel()

    def _taken(self) -> list[Record]:
        return self._feed.take(self._progress, self._clock.wall(), self._others())

    def _failed(self, reason: str) -> None:
        if self._fails_since_s is None:
            self._fails_since_s = self._clock.monotonic()
        if reason != self.problem:
            hint = f"training goes on without it; the next try is in {RETRY_S:.0f} s"
            self._log.warning("tracker_failed", tracker=self.name, reason=reason, hint=hint)
        self.problem = reason

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        former, self._writer = self._writer, None
        if former is not None:
            with contextlib.suppress(Exception):  # it has failed, and its file may be locked
                former.close()
        self._writer = self._writing.open()

    def _put(self, records: Sequence[Record]) -> None:
        assert self._writer is not None
        for record in records:
            self._writer.write(record)
        self._writer.flush()

    def _finish(self, records: Sequence[Record]) -> None:
        if self._writer is not None:
            self._put(records)
            self._writer.close()


def _said(error: Exception) -> str:
    text = " ".join(f"{error}".split()) or "no reason given"
    return text if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"
