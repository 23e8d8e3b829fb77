"""A script's end of the socket to its node's daemon, for engines of named values.

Everything is synchronous: a question blocks the thread that asks until its answer is there, and many threads may ask.
One thread receives; another one runs the program's `pull`, so that updates of keys that this node owns are applied
while the script computes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from p2pnode.training.errors import TrainingError
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.engine_messages import (
    CallAnswered,
    CallReceived,
    EngineAnswered,
    EngineAsked,
    EngineOpened,
    EngineReady,
    NotAnswered,
    PullAsked,
    PullDone,
    Question,
    QuestionRefused,
    Reply,
)
from p2pnode.training.values.encoding import decode_key
from p2pnode.training.values.store import StoreUnavailable, UpdateFailed

#: Calls the program's `pull` with a batch.
OnPull = Callable[[PullAsked], PullDone]


class NoNode(TrainingError, RuntimeError):
    """The script runs without a node, or its node has ended."""


class EngineLink:
    """Made by `connect`."""

    def __init__(self, connection: socket.socket) -> None:
        #: The node leaves, or its run has ended: take no further step.
        self.is_stopping = False
        self._socket = connection
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._open: dict[int, Future[Reply]] = {}
        self._is_lost = False
        self._ready: queue.SimpleQueue[EngineReady | None] = queue.SimpleQueue()
        self._batches: queue.SimpleQueue[PullAsked | None] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[CallReceived | None] = queue.SimpleQueue()
        self._on_pull: OnPull | None = None
        self._can_pull = threading.Event()
        threading.Thread(target=self._receive, name="p2pnode-link", daemon=True).start()
        threading.Thread(target=self._pull, name="p2pnode-pull", daemon=True).start()

    @classmethod
    def connect(
        cls, kind: str, method: str = "", staleness: int = 4, sample: int = 0
    ) -> tuple[EngineLink, EngineReady]:
        """Connect to the node that has started this script; returns when it is in its swarm. Raises `NoNode`."""
        path = os.environ.get(messages.SOCKET_VARIABLE, "")
        script = Path(sys.argv[0]).name or "script.py"
        if not path:
            raise NoNode(f"the engine {kind!r} needs a node: start the script with `p2pnode run -- python {script}`")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
        except OSError as error:
            connection.close()
            raise NoNode(
                f"no p2pnode daemon listens at {path} ({error.strerror}): it has ended, or this script has an engine "
                "already, or a model is attached"
            ) from error
        link = cls(connection)
        link._send(EngineOpened(kind, os.getpid(), method, staleness, sample))
        ready = link._ready.get()
        if ready is None:
            raise NoNode("the p2pnode daemon has ended while the script was starting")
        return link, ready

    # -- questions

    def ask(self, question: Question) -> Reply:
        """The answer to a question. Raises `UpdateFailed`, `StoreUnavailable`, `NoNode`."""
        return self.ask_all([question])[0]

    def ask_all(self, questions: Sequence[Question]) -> list[Reply]:
        """The answers to several, which are under way together. When all are there the first refusal is raised."""
        numbers = [next(self._numbers) for _ in questions]
        answers = [Future[Reply]() for _ in questions]
        self._open.update(zip(numbers, answers, strict=True))
        try:
            for number, question in zip(numbers, questions, strict=True):
                self._send(EngineAsked(number, question))
            if self._is_lost:  # it was lost before the receiving thread knew of these answers
                raise NoNode("the p2pnode daemon has ended")
            replies = [answer.result() for answer in answers]
        finally:
            for number in numbers:
                self._open.pop(number, None)
        for reply in replies:
            if isinstance(reply, QuestionRefused):
                raise error_of(reply)
        return replies

    def _send(self, message: messages.FromTrainer) -> None:
        try:
            with self._sending:
                self._socket.sendall(messages.encode(message))
        except OSError as error:
            raise NoNode("the p2pnode daemon has ended") from error

    # -- pull

    def on_pull(self, function: OnPull) -> None:
        """Call `function`, in a thread of its own, with every batch of updates of keys that this node owns; batches
        that came before wait for it."""
        self._on_pull = function
        self._can_pull.set()

    def _pull(self) -> None:
        self._can_pull.wait()
        while (batch := self._batches.get()) is not None:
            assert self._on_pull is not None
            with contextlib.suppress(NoNode):
                self._send(self._on_pull(batch))

    # -- calls of other nodes' scripts

    def next_call(self, timeout_s: float) -> CallReceived | None:
        """The next call; None after so many seconds, and at the end of the node."""
        try:
            call = self._calls.get(timeout=timeout_s) if timeout_s > 0 else self._calls.get_nowait()
        except queue.Empty:
            return None
        if call is None:
            self._calls.put(None)  # the next one ends at once too
        return call

    def answer(self, answer: CallAnswered) -> None:
        """Answer a call. Raises `NoNode`."""
        self._send(answer)

    # -- receiving

    def close(self) -> None:
        """Close the socket; its threads end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> None:
        decoder = messages.Decoder()
        with contextlib.suppress(OSError, messages.LinkBroken):
            while data := self._socket.recv(1 << 18):
                for message in decoder.from_daemon(data):
                    self._dispatch(message)
        self._is_lost = self.is_stopping = True
        with self._sending:
            self._socket.close()
        self._ready.put(None)
        self._batches.put(None)
        self._calls.put(None)
        self._can_pull.set()
        for number in list(self._open):
            if (answer := self._open.pop(number, None)) is not None:
                answer.set_exception(NoNode("the p2pnode daemon has ended"))

    def _dispatch(self, message: messages.FromDaemon) -> None:
        match message:
            case EngineAnswered(number, reply):
                if (answer := self._open.pop(number, None)) is not None:
                    answer.set_result(reply)
            case PullAsked():
                self._batches.put(message)
            case CallReceived():
                self._calls.put(message)
            case EngineReady():
                self._ready.put(message)
            case messages.RunEnded() | messages.Stop():
                self.is_stopping = True
            case _:
                pass  # `Start` tells a trainer what to train


def error_of(refused: QuestionRefused) -> TrainingError:
    """The error that a refusal stands for."""
    if refused.kind == "update":
        return UpdateFailed(decode_key(refused.key), refused.node, refused.reason)
    if refused.kind == "unanswered":
        return NotAnswered(refused.reason)
    return StoreUnavailable(refused.reason)
