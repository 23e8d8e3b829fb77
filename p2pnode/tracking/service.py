"""Sends the steps of this node to the process that writes them, and says so when they are not written.

The process is started again a minute after it failed. Steps of the time between are lost for the tracker, and counted.
Training does not notice: nothing here waits on the path of a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from overlay.environment import Clock, Log
from p2pnode.config.tracker import Tracker
from p2pnode.tracking.feed import StepFeed
from training.progress import Progress

POLL_INTERVAL_S = 0.5
#: Between a failure and the next try.
RETRY_S = 60.0
#: Records that were sent and not confirmed for so long are a failure: a disk or a library that hangs.
PATIENCE_S = 30.0
#: The imports of trackio take ten seconds on a slow machine.
START_PATIENCE_S = 120.0
#: At the end: time for the last records.
CLOSE_S = 10.0
#: Lines that wait for a slow process; more are dropped and counted.
BUFFER_BYTES = 1 << 20
#: The end of what the process printed, for the reason of a failure.
REASON_BYTES = 4096


class Writing(NamedTuple):
    """Where to write, and as whom: `run` of the swarm, `name` of this node."""

    tracker: Tracker
    folder: Path
    run: str
    name: str

    def command(self) -> list[str]:
        tracker = self.tracker
        # -P: a file csv.py in the working directory is not the module csv.
        program = [sys.executable, "-P", "-m", "p2pnode.tracking"]
        return [*program, tracker.kind, str(tracker.path(self.folder)), self.run, self.name]


class Channel(Protocol):
    """The process as the service sees it."""

    #: Records confirmed as written so far.
    confirmed: int

    def waiting_bytes(self) -> int:
        """What was sent and has not left this process yet."""
        ...

    def send(self, line: bytes) -> None: ...

    async def ended(self) -> str:
        """Wait for its end; the reason it gave."""
        ...

    async def close(self, timeout_s: float) -> None:
        """Let it write what it has, then end it."""
        ...


class ProcessChannel:
    """A child process with pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.confirmed = 0
        self._said = b""
        self._readers = [asyncio.create_task(self._read_confirmations()), asyncio.create_task(self._read_errors())]

    @classmethod
    async def start(cls, command: list[str]) -> ProcessChannel:
        """Raises `OSError`."""
        pipe = asyncio.subprocess.PIPE
        # A session of its own: Ctrl-C is for the daemon, which then sends the last records.
        return cls(
            await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        )

    async def _read_confirmations(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.strip().isdigit():
                self.confirmed = int(line)

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        while piece := await self._process.stderr.read(REASON_BYTES):
            self._said = (self._said + piece)[-REASON_BYTES:]

    def waiting_bytes(self) -> int:
        assert self._process.stdin is not None
        return self._process.stdin.transport.get_write_buffer_size()

    def send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, RuntimeError):  # it has ended, and `ended` says why
            self._process.stdin.write(line)

    async def ended(self) -> str:
        code = await self._process.wait()
        await asyncio.gather(*self._readers)
        lines = [line for line in self._said.decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"it ended with code {code}"

    async def close(self, timeout_s: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        await asyncio.gather(*self._readers, return_exceptions=True)


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
        start: Callable[[list[str]], Awaitable[Channel]] = ProcessChannel.start,
    ) -> None:
        """`others` are further numbers of this node now, such as its peers."""
        self._writing = writing
        self._progress = progress
        self._clock = clock
        self._log = log
        self._others = others
        self._start = start
        self._feed = StepFeed()
        self._channel: Channel | None = None
        self._sent = self._confirmed = 0
        self._moved_s = 0.0
        self._fails_since_s: float | None = None
        self.problem = ""
        #: Records that were not sent, or not confirmed when the process ended.
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
                self._channel = channel = await self._start(self._writing.command())
                self._sent = self._confirmed = 0
                self._moved_s = self._clock.monotonic()
                try:
                    reason = await self._feed_until_it_fails(channel)
                except Exception as error:  # such as a line of the library that no pipe reads
                    reason = repr(error)
                self.lost += self._sent - channel.confirmed
                self._channel = None
                await channel.close(0.0)
            except OSError as error:
                reason = error.strerror or str(error)
            self._failed(reason)
            await asyncio.sleep(RETRY_S)
            self.lost += len(self._feed.take(self._progress, self._clock.wall()))

    async def _feed_until_it_fails(self, channel: Channel) -> str:
        ended = asyncio.create_task(channel.ended())
        try:
            while True:
                await asyncio.wait([ended], timeout=POLL_INTERVAL_S)
                if ended.done():
                    return ended.result()
                self._send(channel)
                if reason := self._hangs(channel):
                    return reason
        finally:
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)

    def _send(self, channel: Channel) -> None:
        for record in self._feed.take(self._progress, self._clock.wall(), self._others()):
            if channel.waiting_bytes() > BUFFER_BYTES:
                self.lost += 1
            else:
                channel.send(record.line())
                self._sent += 1

    def _hangs(self, channel: Channel) -> str:
        """Why this process is given up; empty while it writes."""
        now = self._clock.monotonic()
        if channel.confirmed and self._fails_since_s is not None:
            self._log.info("tracker_writes_again", tracker=self.name, after_s=round(now - self._fails_since_s, 1))
            self._fails_since_s, self.problem = None, ""
        if channel.confirmed != self._confirmed or channel.confirmed == self._sent:
            self._confirmed, self._moved_s = channel.confirmed, now
        patience_s = PATIENCE_S if channel.confirmed else START_PATIENCE_S
        silent_s = now - self._moved_s
        return f"it has written nothing for {silent_s:.0f} s" if silent_s > patience_s else ""

    def _failed(self, reason: str) -> None:
        if self._fails_since_s is None:
            self._fails_since_s = self._clock.monotonic()
        if reason != self.problem:
            hint = f"training goes on without it; the next try is in {RETRY_S:.0f} s"
            self._log.warning("tracker_failed", tracker=self.name, reason=reason, hint=hint)
        self.problem = reason

    async def close(self) -> None:
        """Write what is left, for at most `CLOSE_S`. `run` must have ended before."""
        channel, self._channel = self._channel, None
        if channel is not None:
            self._send(channel)
            await channel.close(CLOSE_S)
