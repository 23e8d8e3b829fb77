"""The trainer's end of the socket: orders, cancellation, stop, and a daemon that ends."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from p2pnode.training.trainer import connection
from p2pnode.training.trainer.connection import DaemonConnection, DaemonGone, ScriptWarnings, StopAsked
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.data_messages import Claim, DataGranted
from p2pnode.training.trainer_link.interface import StepOrder
from p2pnode.training.trainer_link.record_messages import RecordsGranted
from tests.process.harness.trainer_world import wait_until


class Daemon:
    """The daemon's end of a socket pair."""

    def __init__(self) -> None:
        self.socket, self._trainers_end = socket.socketpair()
        self.lost = threading.Event()
        self.connection = DaemonConnection(self._trainers_end, self.lost.set)
        self._decoder = messages.Decoder()

    def send(self, *given: messages.FromDaemon) -> None:
        self.socket.sendall(b"".join(messages.encode(message) for message in given))

    def close(self) -> None:
        """Close both ends, after the receiving thread has ended."""
        self.connection.close()
        assert self.lost.wait(60)
        self._trainers_end.close()
        self.socket.close()

    def received(self) -> list[messages.FromTrainer]:
        return self._decoder.from_trainer(self.socket.recv(1 << 16))


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    made = Daemon()
    yield made
    made.close()


def order(turn: int) -> messages.Train:
    return messages.Train(turn, StepOrder(turn, 10, 1.0, is_first=False))


def test_messages_arrive_in_order_and_time_out(daemon: Daemon) -> None:
    """Two messages in one write are two messages; with none `receive` returns None after its time-out."""
    daemon.send(order(1), order(2))

    assert [daemon.connection.receive(60), daemon.connection.receive(60)] == [order(1), order(2)]
    assert daemon.connection.receive(0.001) is None


def test_a_broken_link_says_how_it_broke(daemon: Daemon) -> None:
    """No daemon has ended then: the script is not told so."""
    daemon.socket.sendall(b"\xff" * 64)

    with pytest.raises(DaemonGone, match="the link to the p2pnode daemon broke: LinkBroken"):
        daemon.connection.receive(60)


def test_a_cancelled_turn_is_interrupted_and_the_next_is_not(daemon: Daemon) -> None:
    """`Cancel` is noticed while the order is executed, without a call of `receive`."""
    daemon.send(order(1))
    daemon.connection.receive(60)
    assert not daemon.connection.interrupted()

    daemon.send(messages.Cancel(1))
    assert wait_until(daemon.connection.interrupted, 60)

    daemon.send(order(2))
    assert daemon.connection.receive(60) == order(2)
    assert not daemon.connection.interrupted()


def test_a_stop_is_raised_by_every_call_from_then_on(daemon: Daemon) -> None:
    """`receive` and `progress` raise, each time, and the current order is to be abandoned."""
    daemon.send(messages.Stop(10.0))

    for _ in range(2):
        with pytest.raises(StopAsked):
            daemon.connection.receive(60)
    with pytest.raises(StopAsked):
        daemon.connection.progress()
    assert daemon.connection.interrupted()


@pytest.mark.parametrize("last", [b"", (3).to_bytes(4, "big") + b"abc"], ids=["closed", "junk"])
def test_a_daemon_that_ends_is_noticed(daemon: Daemon, last: bytes) -> None:
    """A closed socket, or bytes that are no message: `on_lost` is called, and `receive` raises each time."""
    daemon.socket.sendall(last)
    daemon.socket.shutdown(socket.SHUT_RDWR)

    assert daemon.lost.wait(60)
    for _ in range(2):
        with pytest.raises(DaemonGone):
            daemon.connection.receive(60)
    assert daemon.connection.interrupted()


def test_progress_is_sent_once_per_interval(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hundred reports in a row the first is sent."""
    monkeypatch.setattr(connection, "PROGRESS_INTERVAL_S", 20.0)  # a loaded machine takes its time for a hundred
    for _ in range(100):
        daemon.connection.progress()
    daemon.connection.send(messages.Ready())

    assert daemon.received() == [messages.SignOfLife(), messages.Ready()]


def test_the_descriptors_come_with_their_message(daemon: Daemon) -> None:
    """Vector and delta, in this order; without descriptors the answer is refused."""
    first, second = os.pipe()
    try:
        socket.send_fds(daemon.socket, [messages.encode(messages.Memory(5, initialise=True))], [first, second])
        memory, descriptors = daemon.connection.receive_memory()
        assert memory == messages.Memory(5, initialise=True)
        os.write(descriptors[1], b"written")
        assert os.read(first, 7) == b"written"
        for descriptor in descriptors:
            os.close(descriptor)
    finally:
        os.close(first)
        os.close(second)


def test_another_first_message_than_start_is_refused(daemon: Daemon) -> None:
    """A daemon of another version is treated as gone."""
    daemon.send(messages.Ready())  # type: ignore[arg-type]

    with pytest.raises(DaemonGone):
        daemon.connection.receive_start()


def test_news_of_the_last_delta_is_had_without_waiting(daemon: Daemon) -> None:
    """In its order, between two optimiser steps; an order that comes behind it is received afterwards."""
    assert daemon.connection.news() is None
    daemon.send(messages.DeltaEncoded(), messages.ValuesArrived(3, [(0, 1)]), order(2))
    found: list[object] = []
    end_s = time.monotonic() + 60
    while len(found) < 2 and time.monotonic() < end_s:
        found += [] if (news := daemon.connection.news()) is None else [news]
    assert found == [messages.DeltaEncoded(), messages.ValuesArrived(3, [(0, 1)])]
    assert daemon.connection.news() is None
    assert daemon.connection.receive(60) == order(2)


def test_the_answer_to_a_question_about_data_is_waited_for(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of its own number and kind; the trainer says meanwhile that it is alive, and gives up when it is to."""
    monkeypatch.setattr(connection, "POLL_S", 0.001)
    granted = DataGranted(1, 3, [Claim(1, 5, 0)])
    assert daemon.connection.answer(DataGranted, 1, lambda: True) is None
    assert daemon.received()[0] == messages.SignOfLife()

    daemon.send(DataGranted(9, 4, []), RecordsGranted(1, None), granted)

    assert daemon.connection.answer(DataGranted, 1) == granted
    assert daemon.connection.answer(RecordsGranted, 1) == RecordsGranted(1, None)


@pytest.mark.parametrize("how", ["stopped", "lost"])
def test_a_node_that_ends_answers_no_question(daemon: Daemon, how: str) -> None:
    """The wait ends, and so does the next one."""
    if how == "stopped":
        daemon.send(messages.Stop(10.0))
    else:
        daemon.socket.shutdown(socket.SHUT_WR)

    for _ in range(2):
        assert daemon.connection.answer(RecordsGranted, 1) is None


def test_a_finding_is_sent_when_it_changes() -> None:
    """Once while it is so, again with another text, and once more when it has gone; a warning each time."""
    sent: list[messages.FromTrainer] = []
    warnings = ScriptWarnings()
    warnings("differ", "", "call it once")
    for what in ("10 for 5", "10 for 5", "12 for 6", "", ""):
        warnings("differ", what, "call it once")
    warnings("schedule_over", "it has ended")

    warnings.flush(sent.append)
    warnings.flush(sent.append)

    assert sent == [
        messages.Warned("differ", "10 for 5", "call it once"),
        messages.Warned("differ", "12 for 6", "call it once"),
        messages.Warned("differ", "", "call it once"),
        messages.Warned("schedule_over", "it has ended"),
    ]
