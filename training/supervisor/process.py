"""One process of the trainer, as the daemon holds it: started, listened to, and ended. Knows nothing of the link.

What it prints goes to `trainer.log` in the state directory (bounded: one older file is kept) and its last lines are
remembered for the message that tells of its death. It has its own session, so that an interrupt typed at the daemon's
terminal does not end it before the daemon has decided what to save, and so that its children end with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

#: Two files of this size at most are kept of what trainers print.
LOG_BYTES = 1 << 20

#: Lines remembered for the error message: a Python traceback's end, not its middle.
TAIL_LINES = 12
TAIL_LINE_BYTES = 400

#: After a polite request, and after SIGTERM; then SIGKILL. A daemon that leaves has five seconds for everything.
POLITE_S = 2.0
TERMINATE_S = 1.0

#: A child of the trainer may hold its output open after its death; what it still prints is not waited for.
OUTPUT_END_S = 0.5


class OutputLog:
    """A file that takes what trainers print, and the last lines of it."""

    def __init__(self, path: Path, on_output: Callable[[bytes], None] | None = None) -> None:
        self.path = path
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._on_output = on_output
        self._line = b""
        self._file: IO[bytes] | None = None

    def write(self, data: bytes) -> None:
        """Take what was printed. A full disk loses lines, never the trainer."""
        *lines, self._line = (self._line + data).split(b"\n")
        self._line = self._line[-TAIL_LINE_BYTES:]
        for line in lines:
            self._remember(line)
        with contextlib.suppress(OSError):
            self._append(data)
        if self._on_output is not None:
            self._on_output(data)

    def end(self) -> None:
        """The process has ended: its last line is complete."""
        self._remember(self._line)
        self._line = b""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _remember(self, line: bytes) -> None:
        text = line[-TAIL_LINE_BYTES:].decode(errors="replace").rstrip()
        if text:
            self.tail.append(text)

    def _append(self, data: bytes) -> None:
        if self._file is None:
            self._file = self.path.open("ab", buffering=0)
        if self._file.tell() + len(data) > LOG_BYTES:
            self._file.close()
            self.path.replace(self.path.with_name(self.path.name + ".1"))
            self._file = self.path.open("ab", buffering=0)
        self._file.write(data[-LOG_BYTES:])


class _Output(asyncio.Protocol):
    """The reading end of the process's output."""

    def __init__(self, log: OutputLog) -> None:
        self._log = log
        self.ended = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._log.write(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if not self.ended.done():
            self.ended.set_result(None)


class TrainerProcess:
    """A started process. `exited` is done when it has ended and its output has been taken in."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        output: _Output,
        transport: asyncio.ReadTransport,
        log: OutputLog,
    ) -> None:
        self.pid = process.pid
        self._process = process
        self._output = output
        self._transport = transport
        self._log = log
        self.exited = asyncio.create_task(self._wait())

    @classmethod
    async def spawn(cls, command: Sequence[str], environment: Mapping[str, str], log: OutputLog) -> TrainerProcess:
        """Start the command. Raises `OSError` where it cannot be started."""
        reading, writing = os.pipe()
        log.tail.clear()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                env=dict(environment),
                start_new_session=True,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        loop = asyncio.get_running_loop()
        transport, output = await loop.connect_read_pipe(lambda: _Output(log), os.fdopen(reading, "rb", buffering=0))
        return cls(process, output, transport, log)

    async def _wait(self) -> int:
        code = await self._process.wait()
        # What it started and left behind goes with it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        try:
            async with asyncio.timeout(OUTPUT_END_S):
                await asyncio.shield(self._output.ended)
        except TimeoutError:
            pass
        finally:
            self._transport.close()
            self._log.end()
        return code

    @property
    def returncode(self) -> int | None:
        """Its exit code, or minus the number of the signal that ended it; None while it lives."""
        return self._process.returncode

    def how_it_ended(self) -> str:
        """As "exit code 1" or "signal SIGSEGV"."""
        code = self._process.returncode
        if code is None:
            return "no exit code"
        if code >= 0:
            return f"exit code {code}"
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
        return f"signal {-code}"

    def send_signal(self, number: signal.Signals) -> None:
        """To the process and its children; one that has ended is no error."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    async def end(self, *, polite_s: float = 0.0) -> None:
        """Wait `polite_s` for it to end by itself, then terminate, then kill; returns when it has ended."""
        for number, patience_s in ((None, polite_s), (signal.SIGTERM, TERMINATE_S if polite_s else 0.0)):
            if number is not None and patience_s:
                self.send_signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await asyncio.shield(self.exited)
                    return
        self.send_signal(signal.SIGKILL)
        await asyncio.shield(self.exited)
