"""A script's end of the link over a socket pair: answers by number, refusals, batches, calls, and a daemon that ends.

What a script does with it is in tests/unit/training/engines/test_peer.py.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pnode.training.engines.link import EngineLink, NoNode
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.engine_messages import (
    BeginRun,
    CallReceived,
    Counted,
    CountStep,
    Done,
    EngineAnswered,
    PullAsked,
    PullDone,
    QuestionRefused,
)
from p2pnode.training.values.store import StoreUnavailable

LIMIT_S = 10.0


class Daemon:
    """The other end; `read` waits for messages of the script."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.settimeout(LIMIT_S)
        self._decoder = messages.Decoder()
        self._read: list[Any] = []

    def tell(self, *sent: Any) -> None:
        self._socket.sendall(b"".join(map(messages.encode, sent)))

    def read(self) -> Any:
        while not self._read:
            self._read += self._decoder.from_trainer(self._socket.recv(1 << 16))
        return self._read.pop(0)

    def end(self) -> None:
        self._socket.close()


@pytest.fixture
def ends() -> Iterator[tuple[EngineLink, Daemon]]:
    here, there = socket.socketpair()
    link, daemon = EngineLink(here), Daemon(there)
    yield link, daemon
    link.close()
    daemon.end()
    for thread in threading.enumerate():
        if thread.name in ("p2pnode-link", "p2pnode-pull"):
            thread.join(LIMIT_S)


class Asking(threading.Thread):
    """Calls a function of the link, and keeps what it returns or raises."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        super().__init__(daemon=True)
        self._call = lambda: function(*arguments)
        self.found: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.found = self._call()
        except Exception as error:
            self.found = error

    def ends(self) -> Any:
        self.join(LIMIT_S)
        assert not self.is_alive()
        return self.found


def test_an_answer_goes_to_the_question_of_its_number(ends: tuple[EngineLink, Daemon]) -> None:
    """In any order; one to a question that nobody asked is dropped."""
    link, daemon = ends
    asking = Asking(link.ask_all, [BeginRun(), CountStep(3, 0.5)])
    first, second = daemon.read(), daemon.read()
    assert (first.question, second.question) == (BeginRun(), CountStep(3, 0.5))
    assert first.number != second.number

    daemon.tell(EngineAnswered(999, Done()))
    daemon.tell(EngineAnswered(second.number, Done()), EngineAnswered(first.number, Counted(7)))

    assert asking.ends() == [Counted(7), Done()]


def test_the_first_refusal_is_raised_when_all_answers_are_there(ends: tuple[EngineLink, Daemon]) -> None:
    """The questions after it were answered too, and the link stays usable."""
    link, daemon = ends
    asking = Asking(link.ask_all, [BeginRun(), BeginRun(), BeginRun()])
    numbers = [daemon.read().number for _ in range(3)]
    for number, reply in zip(
        numbers, [Done(), QuestionRefused("unavailable", "first"), QuestionRefused("other", "second")], strict=True
    ):
        daemon.tell(EngineAnswered(number, reply))
    found = asking.ends()

    assert isinstance(found, StoreUnavailable)
    assert str(found) == "first"
    asking = Asking(link.ask, BeginRun())
    daemon.tell(EngineAnswered(daemon.read().number, Done()))
    assert asking.ends() == Done()


@pytest.mark.parametrize("end", [messages.RunEnded("done", 5.0), messages.Stop(5.0)])
def test_a_run_that_ends_stops_the_script_and_leaves_it_the_link(end: Any, ends: tuple[EngineLink, Daemon]) -> None:
    """It may still read values."""
    link, daemon = ends
    daemon.tell(end, CallReceived(1, b"s" * 20, b""))
    assert link.next_call(LIMIT_S) is not None
    assert link.is_stopping
    asking = Asking(link.ask, BeginRun())
    daemon.tell(EngineAnswered(daemon.read().number, Done()))
    assert asking.ends() == Done()


def test_batches_wait_until_the_program_can_pull(ends: tuple[EngineLink, Daemon]) -> None:
    """They are given in their order, and each is answered."""
    link, daemon = ends
    daemon.tell(PullAsked(1, [], {}), PullAsked(2, [], {}), CallReceived(1, b"s" * 20, b""))
    assert link.next_call(LIMIT_S) is not None  # the batches are there

    link.on_pull(lambda batch: PullDone(batch.number, {}))

    assert [daemon.read(), daemon.read()] == [PullDone(1, {}), PullDone(2, {})]


def test_a_script_without_a_node_is_told_how_to_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the variable, and with one that names a socket that nobody listens at."""
    monkeypatch.delenv(messages.SOCKET_VARIABLE, raising=False)
    monkeypatch.setattr("sys.argv", ["/somewhere/train.py"])
    with pytest.raises(NoNode, match=r"start the script with `p2pnode run -- python train\.py`"):
        EngineLink.connect("p2p")
    monkeypatch.setenv(messages.SOCKET_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(NoNode, match="no p2pnode daemon listens at"):
        EngineLink.connect("p2p")


def test_the_end_of_the_daemon_ends_every_wait(ends: tuple[EngineLink, Daemon]) -> None:
    """Questions that are open, later ones, and waits for a call; the script is told to stop."""
    link, daemon = ends
    asking = Asking(link.ask, BeginRun())
    daemon.read()
    assert not link.is_stopping
    daemon.end()

    assert isinstance(asking.ends(), NoNode)
    assert link.is_stopping
    began_s = time.monotonic()
    assert [link.next_call(LIMIT_S), link.next_call(LIMIT_S), link.next_call(0.0)] == [None] * 3
    assert time.monotonic() - began_s < LIMIT_S
    with pytest.raises(NoNode, match="daemon has ended"):
        link.ask(BeginRun())
