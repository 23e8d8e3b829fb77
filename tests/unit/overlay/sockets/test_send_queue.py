"""Acknowledged bytes of one connection: exact, from the send queue, or only what the kernel took."""

from __future__ import annotations

from typing import Any

import pytest

from p2pnode.overlay.sockets.send_queue import SLICE_BYTES, SMALL_SLICE_BYTES, SendQueue
from tests.unit.overlay.sockets.wire import SocketWire


def unknown(_socket: Any) -> int:
    raise OSError("not known here")


def ended(_socket: Any) -> int:
    raise ValueError("negative file descriptor")


def test_a_kernel_that_counts() -> None:
    """Its number is taken as it is, whatever waits in which buffer, and never falls."""
    counts = iter([100, 250, 240])
    wire = SocketWire()
    wire.buffered_bytes = 4000
    queue = SendQueue(wire, lambda _socket: next(counts), unknown)

    assert [queue.acknowledged() for _ in range(3)] == [100, 250, 250]
    assert queue.slice_bytes == SLICE_BYTES


def test_a_kernel_that_shows_its_queue() -> None:
    """Acknowledged is what was written, less what waits in the process and in the kernel."""
    wire, in_kernel = SocketWire(), [600]
    queue = SendQueue(wire, unknown, lambda _socket: in_kernel[0])
    queue.written, wire.buffered_bytes = 1000, 300

    assert (queue.acknowledged(), queue.queued()) == (100, 900)
    # What moves from the process into the kernel is no progress; what leaves the kernel is.
    wire.buffered_bytes, in_kernel[0] = 200, 700
    assert queue.acknowledged() == 100
    in_kernel[0] = 650
    assert queue.acknowledged() == 150
    assert queue.slice_bytes == SMALL_SLICE_BYTES


@pytest.mark.parametrize("probe", [None, unknown])
def test_a_kernel_that_shows_nothing(probe: Any) -> None:
    """What the kernel has taken counts as progress then."""
    wire = SocketWire()
    queue = SendQueue(wire, probe, probe)
    queue.written, wire.buffered_bytes = 1000, 400

    assert (queue.acknowledged(), queue.queued()) == (600, 400)


def test_after_the_end_the_last_number_stays() -> None:
    """The socket is gone, and what it has sent still counts."""
    wire, answers = SocketWire(), [500]
    queue = SendQueue(wire, lambda _socket: answers.pop(), unknown)
    queue.written = 800
    assert queue.acknowledged() == 500

    wire.closing = True
    queue._count = ended
    assert (queue.acknowledged(), queue.queued()) == (500, 0)
    queue._count, queue._queue = None, ended
    assert (queue.acknowledged(), queue.queued()) == (500, 0)


def test_a_socket_that_has_ended_has_nothing_queued() -> None:
    """Also where its transport does not know yet: no reading of the line fails because of it."""
    queue = SendQueue(SocketWire(), None, ended)
    queue.written = 800

    assert queue.queued() == 0
