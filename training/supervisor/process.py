"""Starts and ends one trainer process, and collects what it prints. Independent of the messages between the two.

Output goes to `trainer.log` in the state directory, which is bounded: one older file is kept. The last lines are also
kept in memory, for the error message if the process ends unexpectedly. The process has a session of its own. An
interrupt typed at the daemon's terminal therefore does not end it before the daemon has decided what to save. Its
children end with it, also those that a launcher such as torchrun has started in sessions of their own.
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

from p2pnode.overlay.background_output import BackgroundOutput
from p2pnode.overlay.system import in_thread
from p2pnode.training.supervisor import kernel, process_tree
from p2pnode.training.supervisor.kernel import make_nicer
from p2pnode.training.supervisor.printed_end import PrintedEnd
from p2pnode.training.trainer_link.interface import TrainerFailed, cause_of

#: Environment variable of every process of one start: it finds those whose parent was killed.
MARK_VARIABLE = "P2PNODE_TRAINER_START"

#: At most two files of this size are kept.
LOG_BYTES = 1 << 20

#: Lines kept for the error message: enough for the end of a Python traceback.
TAIL_LINES = 12
TAIL_LINE_CHARACTERS = 400
#: Of a longer line no more is read.
LINE_BYTES = 4096

#: A task class ends within this time after it was asked to; a script has `training.finish_s` or `training.stop_s`.
POLITE_S = 2.0
#: From SIGTERM to SIGKILL.
TERMINATE_S = 1.0

#: A child of the trainer may keep its output open after it has ended; its later output is not waited for.
OUTPUT_END_S = 0.5
#: Longest wait for a slow disk to take the end of the output.
LOG_END_S = 1.0


class OutputLog:
    """The trainers' output: a bounded file, and the last lines that the present process printed."""

    def __init__(self, path: Path, on_output: Callable[[bytes], None] | None = None) -> None:
        self.path = path
        self._last_lines: deque[str] = deque(maxlen=TAIL_LINES)
        self.printed_end = PrintedEnd()
        self._on_output = on_output
        self._line = b""
        self._file: IO[bytes] | None = None  # used in the writer's thread only
        self._writer = BackgroundOutput(self._append, note=missing_output)

    @property
    def is_shown(self) -> bool:
        """Whether the user has seen the output at the terminal."""
        return self._on_output is not None

    @property
    def last_lines(self) -> list[str]:
        """The end of the present process's output, without empty lines."""
        return list(self._last_lines)

    def begin(self) -> None:
        """A new process starts: forget the lines of the one before."""
        self._last_lines.clear()
        self.printed_end = PrintedEnd()

    def write(self, data: bytes) -> None:
        """Append output, off the loop. If the disk is full or stuck, lines are lost; the trainer continues."""
        *lines, self._line = (self._line + data).split(b"\n")
        self._line = self._line[-LINE_BYTES:]
        for line in lines:
            self._remember(line)
        self._writer.put(data)
        if self._on_output is not None:
            self._on_output(data)

    async def end(self) -> None:
        """The process has ended, so its last line is complete; returns when the file has it."""
        self._remember(self._line)
        self._line = b""
        self._writer.call(self._close)
        await self._writer.flush(LOG_END_S)

    def _remember(self, line: bytes) -> None:
        # A progress bar writes over its own line.
        shown = line.rstrip().rpartition(b"\r")[2]
        text = shown[:LINE_BYTES].decode(errors="replace")
        if text:
            self._last_lines.append(text[:TAIL_LINE_CHARACTERS])
            self.printed_end.read(text)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, data: bytes) -> None:
        if self._file is None:
            self._file = self.path.open("ab", buffering=0)
        if self._file.tell() + len(data) > LOG_BYTES:
            self._file.close()
            self.path.replace(self.path.with_name(self.path.name + ".1"))
            self._file = self.path.open("ab", buffering=0)
        self._file.write(data[-LOG_BYTES:])


def missing_output(_pieces: int, size_bytes: int) -> bytes:
    """The line in an output where so much of it was dropped."""
    return (
        f"\n[p2pnode: {size_bytes} bytes of output are missing here: they came faster than they were read]\n".encode()
    )


class _Output(asyncio.Protocol):
    """Reads the process's output."""

    def __init__(self, log: OutputLog) -> None:
        self._log = log
        self.ended = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._log.write(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if not self.ended.done():
            self.ended.set_result(None)


class TrainerProcess:
    """A started process. `exited` is done when it has ended and its output has been read."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        output: _Output,
        transport: asyncio.ReadTransport,
        log: OutputLog,
        mark: str,
    ) -> None:
        self.pid = process.pid
        self._mark = mark
        self._process = process
        self._output = output
        self._transport = transport
        self._log = log
        self._kills_before = kernel.kills()
        self.exited = asyncio.create_task(self._wait())

    @classmethod
    async def spawn(
        cls, command: Sequence[str], environment: Mapping[str, str], log: OutputLog, *, nice: int = 0
    ) -> TrainerProcess:
        """Start the command, so much nicer than this process. Raises `OSError` if that fails."""
        reading, writing = os.pipe()
        log.begin()
        mark = os.urandom(8).hex()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                env={**environment, MARK_VARIABLE: mark},
                start_new_session=True,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        try:
            kernel.kill_first(process.pid)
            await make_nicer(process.pid, nice)
            loop = asyncio.get_running_loop()
            transport, output = await loop.connect_read_pipe(
                lambda: _Output(log), os.fdopen(reading, "rb", buffering=0)
            )
        except BaseException:
            # Cancelled, or out of descriptors: nobody else knows of this process.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.shield(process.wait())
            raise
        return cls(process, output, transport, log, mark)

    async def _wait(self) -> int:
        code = await self._process.wait()
        # End the children that it left behind.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if code < 0:
            # A launcher that was killed could not end its ranks, which have sessions of their own.
            _kill_each(await in_thread(process_tree.with_variable, MARK_VARIABLE, self._mark))
        try:
            async with asyncio.timeout(OUTPUT_END_S):
                await asyncio.shield(self._output.ended)
        except TimeoutError:
            pass
        finally:
            self._transport.close()
            await self._log.end()
        return code

    @property
    def returncode(self) -> int | None:
        """Its exit code, or minus the number of the signal that ended it; None while it runs."""
        return self._process.returncode

    @property
    def memory_ran_out(self) -> bool:
        """Whether the kernel has killed a process of its control group since it began."""
        return kernel.kills() > self._kills_before

    def how_it_ended(self) -> str:
        """As "exit code 1" or "signal SIGSEGV"."""
        code = self._process.returncode
        return "no exit code" if code is None else name_of(code)

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the process and its children; does nothing if it has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    async def ends_within(self, seconds: float) -> bool:
        """Whether it ends by itself in this time."""
        await asyncio.wait([self.exited], timeout=seconds)
        return self.exited.done()

    async def end(self, *, polite_s: float = 0.0) -> bool:
        """Wait `polite_s` for it to end by itself, then send SIGTERM, then SIGKILL. Returns when it has ended, and
        whether it did so by itself."""
        if await self.ends_within(polite_s):
            return True
        below = await _descendants(self.pid)
        if polite_s:
            await self._terminate(below)
        else:
            await self._kill(below)
        return False

    async def terminate(self) -> None:
        """Send SIGTERM, then SIGKILL; returns when it has ended."""
        await self._terminate(await _descendants(self.pid))

    async def _terminate(self, below: list[int]) -> None:
        self.send_signal(signal.SIGTERM)
        await self.ends_within(TERMINATE_S)
        await self._kill(below)

    async def _kill(self, below: list[int]) -> None:
        """`below`: its descendants, found while it lived; without their parent they are not found any more."""
        self.send_signal(signal.SIGKILL)
        _kill_each(below)
        await asyncio.shield(self.exited)

    async def work_seconds(self) -> float | None:
        """How long it and its descendants have worked (`process_tree.work_seconds`); None where that is not known."""
        return await in_thread(process_tree.work_seconds, self.pid)


def name_of(code: int) -> str:
    """As "exit code 1" or "signal SIGSEGV". `code` is minus the number of a signal."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


async def _descendants(pid: int) -> list[int]:
    return await in_thread(process_tree.descendants, pid)


def _kill_each(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


#: Signals by which schedulers and people end a process: that is no failure of the script.
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def unexpected_end(process: TrainerProcess, output: OutputLog, *, is_fatal: bool) -> TrainerFailed:
    """The failure of a process that ended without a `Failed` message. `is_fatal`: a further start would end in the same
    way, unless a signal ended this one."""
    if process.returncode is None or process.returncode == 0:
        return TrainerFailed(
            "the training script ended before the swarm was done",
            "it has to call p2pnode.attach(model, optimizer) and swarm.step() until swarm.done, or p2pnode.engine(…)",
            fatal=process.returncode == 0,
        )
    code = output.printed_end.exit_code(process.returncode)
    if code == -signal.SIGKILL and process.memory_ran_out:
        return _killed_for_memory(kernel.limit_bytes())
    exception, printed = output.printed_end.exception(code), output.last_lines
    # The last lines of a launcher are its banner.
    last = exception or (printed[-1] if printed and code == process.returncode else "")
    reason = f"the trainer ended with {name_of(code)}" + (f": {last}" if last else "")
    if not printed:
        reason += ": it printed nothing"
    # The terminal shows the script's traceback already.
    shown = f"what it printed is above and in {output.path}"
    lines = "".join(f"\n  {line}" for line in printed)
    hint = shown if output.is_shown else f"its last lines (more in {output.path}):{lines}"
    cause = "" if -code in FROM_OUTSIDE else cause_of(exception) or name_of(code)
    return TrainerFailed(reason, hint, fatal=is_fatal and code > 0, cause=cause)


def _killed_for_memory(limit_bytes: int | None) -> TrainerFailed:
    limit = "" if limit_bytes is None else f" of {limit_bytes / 1e6:,.0f} MB"
    return TrainerFailed(
        f"the kernel killed the trainer, because the memory limit{limit} of its control group was reached",
        "lower the batch size, the length of the sequences or the DataLoader's num_workers, or give the container more",
    )
