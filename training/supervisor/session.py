"""One trainer process and the socket to it: opens both, sends orders, dispatches messages, and closes them.

If the process ends without a `Failed` message, the reason is derived from its exit code and its last lines. Time-outs
of orders are decided by the caller (`training.supervisor.process_trainer`), which is told of every message.

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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from p2pnode.overlay.environment import Log
from p2pnode.overlay.system import ThreadExecutor
from p2pnode.training.layout import Layout
from p2pnode.training.supervisor.gpu_errors import explained
from p2pnode.training.supervisor.launch import Launch
from p2pnode.training.supervisor.process import OUTPUT_END_S, POLITE_S, OutputLog, TrainerProcess, unexpected_end
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.engine_messages import EngineOpened
from p2pnode.training.trainer_link.interface import TrainerFailed, TrainerHello, TrainerLeft
from p2pnode.training.trainer_link.messages import Hello
from p2pnode.training.trainer_link.shared_memory import SharedVectors


class SocketSender:
    """Writes messages to one non-blocking socket, in order, without blocking the event loop.

    Most messages are short, and the trainer always reads, so they are written at once. Values of an engine may be
    larger than the socket's buffer: what it does not take waits in memory, and the script's questions bound how much.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._waiting: list[bytes] = []
        self._writer: asyncio.Task[None] | None = None

    def send(self, data: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Write, now or as soon as the socket takes it. A broken socket is the reader's to notice. Descriptors travel
        with a message of the start, when nothing else is under way."""
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

    async def stop(self) -> None:
        """Write no more; idempotent."""
        if (writer := self._writer) is not None:
            writer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writer


#: The path of a Unix socket is limited to 108 bytes on Linux and 104 on macOS, with the terminating zero.
SOCKET_PATH_BYTES = 100

OnMessage = Callable[["TrainerSession", messages.FromTrainer], None]
OnLost = Callable[["TrainerSession", TrainerFailed], None]
Opening = TypeVar("Opening", bound=Hello | EngineOpened | messages.Ready)

#: From the start of the process to its `Hello`: a script may load a large data set before it builds its model.
START_TIMEOUT_S = 1800.0


@dataclass(eq=False)
class TrainerSession:
    """One process and its socket, until the process ends."""

    process: TrainerProcess
    connection: socket.socket
    launch: Launch
    output: OutputLog
    log: Log
    on_message: OnMessage
    on_lost: OnLost
    failure: TrainerFailed | None = None
    _is_dismissed: bool = False
    _uses_engine: bool = False
    #: What p2pnode has of the memory of the trainer's GPU.
    _device_bytes: int = 0
    _turn: int = 0
    _reply: asyncio.Future[messages.FromTrainer] | None = None
    #: The files of orders to save that the trainer writes beside its training, by turn.
    _files: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    _opening: asyncio.Queue[messages.FromTrainer | TrainerFailed] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self._sender = SocketSender(self.connection)
        self._is_proven = self.launch.is_proven
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def open(
        cls, launch: Launch, output: OutputLog, log: Log, on_message: OnMessage, on_lost: OnLost
    ) -> TrainerSession:
        """Start the process and wait until it has connected. Raises `TrainerFailed`."""
        command, state_dir = launch.command, launch.state_dir
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
            environment = launch.environment | {messages.SOCKET_VARIABLE: str(path)}
            try:
                process = await TrainerProcess.spawn(command, environment, output, nice=launch.nice)
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
        return cls(process, connection, launch, output, log, on_message, on_lost)

    def send(self, message: messages.FromDaemon, descriptors: tuple[int, ...] = ()) -> None:
        """Send a message."""
        self._sender.send(messages.encode(message), descriptors)

    def ask(self, order: messages.Order) -> asyncio.Future[messages.FromTrainer]:
        """Send an order; the future gives its answer, or raises the trainer's failure."""
        self._turn = order.turn
        self._reply = asyncio.get_running_loop().create_future()
        if isinstance(order, messages.Save):
            self._files = {turn: file for turn, file in self._files.items() if not file.done()}
            self._files[order.turn] = asyncio.get_running_loop().create_future()
        self.send(order)
        return self._reply

    def file(self, turn: int) -> asyncio.Future[None]:
        """A future that is done when the file of an order to save is written; it raises `TrainerFailed`."""
        return self._files[turn]

    def awaits(self, turn: int) -> bool:
        """Whether the order of this turn is under way, and was not cancelled."""
        return self._reply is not None and not self._reply.done() and turn == self._turn

    def forget(self) -> None:
        """The caller no longer waits for the order."""
        if self._reply is not None and self._reply.done() and not self._reply.cancelled():
            self._reply.exception()  # Marks the exception as retrieved.
        self._reply = None

    async def expect(self, name: str, *kinds: type[Opening]) -> Opening:
        """The next message of the start-up, which is to be of these kinds. Raises `TrainerFailed`."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                got = await self._opening.get()
        except TimeoutError:
            raise TrainerFailed(
                f"the trainer did not send {name} within {START_TIMEOUT_S:.0f} s of its start",
                f"what it printed is in {self.output.path}",
            ) from None
        if isinstance(got, TrainerFailed):
            raise got
        if not isinstance(got, kinds):
            raise TrainerFailed(f"the trainer sent {type(got).__name__} instead of {name}", fatal=True)
        return got

    async def kill(self, reason: str, hint: str) -> None:
        """End the process at once, with this reason; another start may succeed."""
        self.failure = TrainerFailed(reason, hint)
        await self.process.end()

    def fail_order(self, failure: TrainerFailed) -> None:
        """The order under way will not be answered."""
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(failure)

    def dismiss(self, message: messages.RunEnded | messages.Stop) -> None:
        """Tell the process to end; from now on its end is no failure. Messages keep their order, so an order to save
        that is still pending is answered before."""
        self._is_dismissed = True
        self.failure = self.failure or TrainerFailed("the trainer was stopped")
        self.send(message)

    async def files_written(self, timeout_s: float) -> bool:
        """Wait until every pending file is written or has failed. Returns whether there was one."""
        pending = [file for file in self._files.values() if not file.done()]
        if pending:
            await asyncio.wait(pending, timeout=timeout_s)
        return bool(pending)

    async def close(self, *, polite_s: float) -> bool:
        """End the process and close the socket; idempotent. Returns whether the process ended by itself."""
        self.failure = self.failure or TrainerFailed("the trainer was stopped")
        try:
            by_itself = await self.process.end(polite_s=polite_s)
            # Its last messages are still to be read: one may say that a file is written.
            await asyncio.wait([self._reader], timeout=OUTPUT_END_S)
            return by_itself
        finally:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            await self._sender.stop()
            self.connection.close()
            self.fail_order(self.failure)
            for file in self._files.values():
                self._end_file(file, self.failure)

    async def _read(self) -> None:
        """Dispatch messages until the socket closes; when the process has ended too, fail what is pending."""
        decoder = messages.Decoder()
        loop = asyncio.get_running_loop()
        before_hello = True
        try:
            with contextlib.suppress(OSError):
                while data := await loop.sock_recv(self.connection, 1 << 16):
                    for message in decoder.from_trainer(data):
                        before_hello = before_hello and not isinstance(message, messages.Hello | EngineOpened)
                        self._dispatch(message)
        except messages.LinkBroken as error:
            self.failure = self.failure or TrainerFailed(f"the trainer's link is broken: {error}")
        except Exception as error:  # without a reader of the link the trainer would wait for ever
            self.log.error("service_failed", service="trainer-link", error=repr(error))
            self.failure = self.failure or TrainerFailed(f"its node could not handle a message: {error!r}")
        if self._is_dismissed or (self.launch.is_script and self.failure is None):
            await asyncio.shield(self.process.exited)
        else:
            await self.process.end(polite_s=POLITE_S)
        failure = self.failure = self.failure or self._own_end(before_hello=before_hello)
        self._opening.put_nowait(failure)
        self.fail_order(failure)
        for file in self._files.values():
            self._end_file(file, failure)
        self.on_lost(self, failure)

    @staticmethod
    def _end_file(file: asyncio.Future[None], end: messages.Written | messages.NotWritten | TrainerFailed) -> None:
        if file.done():
            return
        if isinstance(end, messages.Written):
            file.set_result(None)
        else:
            file.set_exception(end if isinstance(end, TrainerFailed) else TrainerFailed(end.reason, end.hint))
            file.exception()  # Marks the exception as retrieved: perhaps no task waits for it.

    def _own_end(self, *, before_hello: bool) -> TrainerFailed:
        """The failure to report for a process that ended without an order to end."""
        if self.launch.is_script and self.process.returncode == 0 and not before_hello:
            what = "ended" if self._uses_engine else "returned before the run was over"
            return TrainerLeft(f"the script has {what}")
        ended = unexpected_end(self.process, self.output, is_fatal=before_hello or not self._is_proven)
        return explained(ended, self.output.last_lines, self._device_bytes)

    def _dispatch(self, message: messages.FromTrainer) -> None:
        self.on_message(self, message)
        match message:
            case messages.Written() | messages.NotWritten() if message.turn in self._files:
                self._end_file(self._files[message.turn], message)
            case (
                messages.Trained()
                | messages.Merged()
                | messages.Evaluated()
                | messages.Copied()
                | messages.Written()
                | messages.Described()
                | messages.NotWritten()
            ):
                self._is_proven = self._is_proven or isinstance(message, messages.Trained)
                if self._reply is not None and self.awaits(message.turn):
                    self._reply.set_result(message)
            case messages.Hello() | messages.Ready() | EngineOpened():
                self._uses_engine = self._uses_engine or isinstance(message, EngineOpened)
                if isinstance(message, Hello):
                    self._device_bytes = message.hello.device_bytes
                self._opening.put_nowait(message)
            case messages.Warned() if message.message:
                hint = {"hint": message.do} if message.do else {}
                self.log.warning("trainer_warned", about=message.event, message=message.message, **hint)
            case messages.Failed():
                fatal = message.fatal or not self._is_proven
                failed = TrainerFailed(message.reason, message.hint, fatal=fatal)
                self.failure = self.failure or explained(failed, own_bytes=self._device_bytes)


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


def hello_of(opened: Hello | EngineOpened) -> TrainerHello:
    """The trainer as it describes itself. A script with an engine has an empty layout: it trains no model."""
    if isinstance(opened, Hello):
        return opened.hello
    return TrainerHello(
        Layout(()), f"engine {opened.kind}", "1", "", "cpu", evaluates=False, pid=opened.pid, engine=opened
    )


def checked_total(total: int) -> None:
    """Raises `TrainerFailed` for a model without values."""
    if total < 1:
        raise TrainerFailed("the model has no trainable parameter", "see requires_grad of its parameters", fatal=True)


async def allocate(total: int) -> SharedVectors:
    """The buffers for a model of so many values. Raises `TrainerFailed`."""
    checked_total(total)
    executor = ThreadExecutor(1)  # Allocating gigabytes takes seconds, and happens once.
    try:
        return cast(SharedVectors, await executor.run(SharedVectors, total))
    finally:
        executor.close()
