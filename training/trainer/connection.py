"""The trainer's end of the socket to the daemon. A thread receives, so that a stop, a cancelled order and the end of
the daemon are noticed while the main thread computes. No torch.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from p2pnode.training.errors import TrainingError
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.data_messages import DataGranted, DataKnown
from p2pnode.training.trainer_link.interface import TrainerFailed
from p2pnode.training.trainer_link.record_messages import RecordsGranted

#: Progress is sent at most this often.
PROGRESS_INTERVAL_S = 0.2

#: A trainer that waits for an answer says so often that it is alive, and looks whether it is to stop.
POLL_S = 0.5

#: Buffers of this node that are mapped at most.
MAX_DESCRIPTORS = 4

_PR_SET_PDEATHSIG = 1

#: An answer to a question; its `number` is that of the question.
Answer = TypeVar("Answer", DataGranted, RecordsGranted, messages.StepAnswered)


class DaemonGone(TrainingError):
    """The daemon has closed the socket or ended; or the link to it is broken, and the text says how."""


class SwarmLost(TrainingError, RuntimeError):
    """The daemon has ended; the model holds what this node trained last."""


class StopAsked(TrainingError):
    """The daemon has sent `RunEnded` or `Stop`."""


class DaemonConnection:
    """Made by `connect`. `on_lost` is called in the receiving thread when the socket has closed."""

    def __init__(self, connection: socket.socket, on_lost: Callable[[], None] | None = None) -> None:
        self.stopping = False
        self.lost = False
        #: How the link broke; empty where the daemon has closed it.
        self.broken = ""
        self._socket = connection
        self._on_lost = on_lost
        self._inbox: queue.SimpleQueue[messages.FromDaemon | None] = queue.SimpleQueue()
        #: The next message, if `news` has met one that is none of its own.
        self._ahead: messages.FromDaemon | None = None
        self._descriptors: list[int] = []
        self._cancelled = 0
        self._turn = 0
        self._progress_s = 0.0
        #: What the swarm is known to have trained of the data that its nodes share; None before the daemon has told.
        self.known: DataKnown | None = None
        #: Answers to questions, by their kind; None: look whether to give up.
        self._answers: dict[type[Any], queue.SimpleQueue[Any]] = {
            kind: queue.SimpleQueue() for kind in (DataGranted, RecordsGranted, messages.StepAnswered)
        }
        self._asked = 0
        #: A script may call `swarm.alive()` in a thread of its own.
        self._sending = threading.Lock()
        threading.Thread(target=self._listen, name="p2pnode-link", daemon=True).start()

    @classmethod
    def connect(cls, path: str, on_lost: Callable[[], None] | None = None) -> DaemonConnection:
        """Connect to the daemon's socket. Raises `OSError`."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            raise
        return cls(connection, on_lost)

    # --- sending ------------------------------------------------------------------------------------------------

    def send(self, message: messages.FromTrainer) -> None:
        """Send one message, from any thread. Raises `DaemonGone`."""
        try:
            with self._sending:
                self._socket.sendall(messages.encode(message))
        except OSError as error:
            raise DaemonGone(self.broken) from error

    def progress(self) -> None:
        """Say that all is well, at most once per interval. Raises `StopAsked`, `DaemonGone`."""
        if self.stopping:
            raise StopAsked
        now_s = time.monotonic()
        if now_s - self._progress_s >= PROGRESS_INTERVAL_S:
            self._progress_s = now_s
            self.send(messages.SignOfLife())

    def close(self) -> None:
        """Close the socket; the receiving thread ends."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    # --- receiving ----------------------------------------------------------------------------------------------

    def news(self) -> messages.DeltaEncoded | messages.ValuesArrived | None:
        """What the daemon has said of the last delta since the last call; without waiting."""
        if self._ahead is None and not self._inbox.empty():
            self._ahead = self._inbox.get()
            if self._ahead is None:
                self._inbox.put(None)  # `receive` raises.
        if isinstance(self._ahead, messages.DeltaEncoded | messages.ValuesArrived):
            found, self._ahead = self._ahead, None
            return found
        return None

    def receive(self, timeout_s: float | None = None) -> messages.FromDaemon | None:
        """The next message; None after `timeout_s`. Raises `StopAsked`, `DaemonGone`."""
        if (message := self._ahead) is not None:
            self._ahead = None
        else:
            try:
                message = self._inbox.get(timeout=timeout_s)
            except queue.Empty:
                return None
        if message is None:
            self._inbox.put(None)  # The next call raises too.
            raise DaemonGone(self.broken)
        if isinstance(message, messages.RunEnded | messages.Stop):
            self._inbox.put(message)
            raise StopAsked
        if isinstance(message, messages.Order):
            self._turn = message.turn
        return message

    def answer(self, kind: type[Answer], number: int, gives_up: Callable[[], bool] = lambda: False) -> Answer | None:
        """Wait for the answer to the question `number`, and say meanwhile that all is well. None: this node ends, or
        `gives_up` is true after a while. Raises `DaemonGone`."""
        while not self.stopping and not self.lost:
            try:
                answer: Answer | None = self._answers[kind].get(timeout=POLL_S)
            except queue.Empty:
                self.send(messages.SignOfLife())
                answer = None
            if answer is not None and answer.number == number:
                return answer
            if gives_up():
                return None
        return None

    def receive_start(self) -> messages.Start:
        """The daemon's first message."""
        message = self.receive()
        if not isinstance(message, messages.Start):
            raise DaemonGone(self.broken)
        return message

    def next_step(self) -> messages.StepAnswer:
        """Ask what the next iteration of the present turn is, and wait for the answer; `STOP` if the order is to be
        abandoned. Raises `DaemonGone`."""
        self._asked += 1
        self.send(messages.StepWanted(self._turn, self._asked))
        answer = self.answer(messages.StepAnswered, self._asked, self.interrupted)
        return messages.StepAnswer.STOP if answer is None else answer.answer

    def receive_memory(self) -> tuple[messages.Memory, tuple[int, ...]]:
        """The answer to `Hello`, with the descriptors of vector and delta, and perhaps those of the leaders' values."""
        message = self.receive()
        if not isinstance(message, messages.Memory) or not 2 <= len(self._descriptors) <= MAX_DESCRIPTORS:
            raise DaemonGone
        return message, tuple(self._descriptors)

    def interrupted(self) -> bool:
        """Whether to abandon the current order: it was cancelled, or the trainer has to end."""
        return self.stopping or self.lost or self._cancelled >= self._turn > 0

    def _listen(self) -> None:
        decoder = messages.Decoder()
        try:
            while data := self._read():
                for message in decoder.from_daemon(data):
                    if isinstance(message, messages.Cancel):
                        self._cancelled = max(self._cancelled, message.turn)
                        self._wake()
                        continue
                    if isinstance(message, DataKnown):
                        self.known = message
                        continue
                    if (waiting := self._answers.get(type(message))) is not None:
                        waiting.put(message)
                        continue
                    self.stopping = self.stopping or isinstance(message, messages.RunEnded | messages.Stop)
                    self._inbox.put(message)
                    if self.stopping:
                        self._wake()
        except ConnectionError:
            pass  # The daemon was killed.
        except (OSError, messages.LinkBroken) as error:
            self.broken = f"the link to the p2pnode daemon broke: {error!r}"
        self.lost = True
        self._wake()
        self._inbox.put(None)
        if self._on_lost is not None:
            self._on_lost()

    def _wake(self) -> None:
        for waiting in self._answers.values():
            waiting.put(None)

    def _read(self) -> bytes:
        ancillary_bytes = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
        data, extra, _, _ = self._socket.recvmsg(1 << 16, ancillary_bytes)
        for level, kind, content in extra:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors = array.array("i")
                descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
                self._descriptors.extend(descriptors)
        return data


class Warn(Protocol):
    """Called with a constant event and a text. With `do`, what to do, it is a finding, which `/status` shows."""

    def __call__(self, event: str, message: str, do: str = "", /) -> None: ...


class ScriptWarnings:
    """What a script's node is to be told, sent between two steps. Called as `Warn`: a warning is for the log. `/status`
    shows a finding until its event is found with another text; an empty text ends it."""

    def __init__(self) -> None:
        self._pending: list[messages.Warned] = []
        self._found: dict[str, str] = {}

    def __call__(self, event: str, message: str, do: str = "") -> None:
        if do:
            if self._found.get(event, "") == message:
                return
            self._found[event] = message
        self._pending.append(messages.Warned(event, message, do))

    def flush(self, send: Callable[[messages.FromTrainer], None]) -> None:
        """Send what is pending. Raises `DaemonGone`."""
        pending, self._pending = self._pending, []
        for warned in pending:
            send(warned)


def report_failure(connection: DaemonConnection, failure: TrainerFailed) -> None:
    """Report the failure, unless the daemon has ended."""
    with contextlib.suppress(DaemonGone):
        connection.send(messages.Failed(failure.reason, failure.hint, failure.fatal))


def end_with_daemon(number: signal.Signals) -> None:
    """Have the kernel send this signal when the daemon ends (Linux); elsewhere the closed socket has to suffice.

    Only for a direct child of the daemon: the end of another parent means nothing.
    """
    daemon = os.environ.get(messages.DAEMON_VARIABLE, "")
    if not sys.platform.startswith("linux") or str(os.getppid()) != daemon:
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if str(os.getppid()) != daemon:  # It has ended in between.
        os.kill(os.getpid(), number)
