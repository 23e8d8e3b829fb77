"""The socket between daemon and trainer, and the start of a process that connects to it.

The socket of a script may close long before its process ends: rank 0 of several has finished, or the script is part of
a shell script. So the end of the process decides, not the end of the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from p2pnode.training.supervisor.process import OutputLog, TrainerProcess, unexpected_end
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.interface import TrainerFailed, TrainerLeft

#: The path of a Unix socket is limited to 108 bytes on Linux and 104 on macOS, with the terminating zero.
SOCKET_PATH_BYTES = 100

#: From the start of the process to its `Hello`: a script may load a large data set before it builds its model.
START_TIMEOUT_S = 1800.0


class TrainerSocket:
    """Messages over one non-blocking socket, in order. Writing does not block the event loop.

    Most messages are short, and the trainer always reads, so they are written at once. Values of an engine may be
    larger than the socket's buffer: what it does not take waits in memory, and the script's questions bound how much.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._waiting: list[bytes] = []
        self._writer: asyncio.Task[None] | None = None

    def send(self, message: messages.FromDaemon, descriptors: tuple[int, ...] = ()) -> None:
        """Write, now or as soon as the socket takes it. A broken socket is the reader's to notice. Descriptors travel
        with a message of the start, when nothing else is under way."""
        data = messages.encode(message)
        if self._writer is not None:
            self._waiting.append(data)
            return
        try:
            sent = socket.send_fds(self._connection, [data], list(descriptors))
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            return
        if sent < len(data):
            self._waiting.append(data[sent:])
            self._writer = asyncio.create_task(self._write(), name="trainer-link")

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                await loop.sock_sendall(self._connection, self._waiting.pop(0))
        except OSError:
            self._waiting.clear()
        finally:
            self._writer = None

    async def received(self) -> AsyncIterator[messages.FromTrainer]:
        """The trainer's messages, until it closes the socket. Raises `LinkBroken`."""
        decoder, loop = messages.Decoder(), asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(self._connection, 1 << 16):
                for message in decoder.from_trainer(data):
                    yield message

    async def close(self) -> None:
        """Write and read no more; idempotent."""
        if (writer := self._writer) is not None:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
        self._connection.close()


async def start_connected(
    command: Sequence[str], environment: Mapping[str, str], state_dir: Path, output: OutputLog, *, nice: int
) -> tuple[TrainerProcess, TrainerSocket]:
    """Start a trainer process, and wait until it has connected. Raises `TrainerFailed`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    process: TrainerProcess | None = None
    try:
        folder, temporary = _socket_folder(state_dir)
        path = folder / "link"
        alone = folder / messages.ALONE_FILE
        for old in (path, alone):
            old.unlink(missing_ok=True)
        listener.setblocking(False)
        listener.bind(str(path))
        listener.listen(1)
    except OSError as error:
        listener.close()
        raise TrainerFailed(
            f"the trainer's socket cannot be made in {state_dir}: {error.strerror or error}",
            "check the state directory's permissions and free space",
        ) from error
    try:
        try:
            process = await TrainerProcess.spawn(
                command, {**environment, messages.SOCKET_VARIABLE: str(path)}, output, nice=nice
            )
        except OSError as error:
            raise TrainerFailed(
                f"the trainer's command could not be started: {command[0]}: {error.strerror}",
                "see that the program exists and can be run",
                fatal=True,
            ) from error
        connection = await _connected(listener, process, alone)
        if connection is None:
            if process.returncode == 0 and _works_alone(alone):
                raise TrainerLeft("the script has ended; it needed no model of its node")
            raise unexpected_end(process, output, is_fatal=True)
    except BaseException:
        if process is not None:
            await process.end()
        raise
    finally:
        # One connection only: a second process cannot attach.
        listener.close()
        for old in (path, alone):
            old.unlink(missing_ok=True)
        if temporary:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                folder.rmdir()
    return process, TrainerSocket(connection)


async def _connected(listener: socket.socket, process: TrainerProcess, alone: Path) -> socket.socket | None:
    """The socket to the trainer; None if the process ended before it connected. The file `alone` says that a script
    works without its node: then there is no timeout."""
    loop = asyncio.get_running_loop()
    accepting = asyncio.create_task(loop.sock_accept(listener))
    try:
        ends: list[asyncio.Future[Any]] = [accepting, process.exited]
        await asyncio.wait(ends, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if _works_alone(alone):
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if accepting.done():
            connection, _ = accepting.result()
            connection.setblocking(False)
            return connection
        if process.returncode is None:
            raise TrainerFailed(
                f"the trainer has not attached within {START_TIMEOUT_S:.0f} s of its start",
                "call p2pnode.attach(model, optimizer) in the script that `p2pnode run` starts",
            )
        return None
    finally:
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)


def _works_alone(mark: Path) -> bool:
    """Whether a script has said that it needs no model of its node: the mark is a file beside its socket."""
    return mark.exists()


def _socket_folder(state_dir: Path) -> tuple[Path, bool]:
    """A folder that only this user can enter, and whether it is temporary."""
    folder = (state_dir / "trainer").absolute()
    if len(os.fsencode(folder / "link")) > SOCKET_PATH_BYTES:
        return Path(tempfile.mkdtemp(prefix="p2pnode-")), True
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    return folder, False
