"""Output written from a thread: in order, never blocking, with a note where something was dropped."""

from __future__ import annotations

import asyncio
import os
import threading
import time

from p2pnode.overlay.background_output import BackgroundOutput, descriptor_writer

WAIT_S = 60.0


class Receiver:
    """Takes nothing until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        self.taken: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.entered.set()
        assert self.open.wait(WAIT_S)
        self.taken.append(data)


def note(pieces: int, size_bytes: int) -> bytes:
    return b"<%d pieces, %d bytes>" % (pieces, size_bytes)


def test_pieces_come_out_in_order_and_functions_between_them() -> None:
    """What was queued is written in the order of the calls; `drain` waits for all of it."""
    receiver = Receiver()
    receiver.open.set()
    output = BackgroundOutput(receiver.write)

    output.put(b"a")
    output.call(lambda: receiver.taken.append(b"called"))
    output.put(b"b")

    assert output.drain(WAIT_S)
    assert receiver.taken == [b"a", b"called", b"b"]


def test_a_receiver_that_takes_nothing_blocks_nobody() -> None:
    """`put` returns at once, the queue stays bounded, and a note stands where pieces are missing."""
    receiver, gaps = Receiver(), []
    output = BackgroundOutput(receiver.write, note=note, on_drop=lambda: gaps.append(1), queue_bytes=30)
    output.put(b"first")
    assert receiver.entered.wait(WAIT_S)  # the thread holds the first piece, the queue is empty

    began = time.monotonic()
    for _ in range(10):
        output.put(b"x" * 10)
    assert time.monotonic() - began < WAIT_S / 2  # the receiver takes nothing for as long as it may
    assert not output.drain(0.0)
    assert (output.dropped, len(gaps)) == (7, 1)

    receiver.open.set()
    assert output.drain(WAIT_S)
    output.put(b"last")
    assert output.drain(WAIT_S)
    assert receiver.taken == [b"first", *[b"x" * 10] * 3, b"<7 pieces, 70 bytes>", b"last"]


def test_short_pieces_do_not_end_a_gap_in_a_full_queue() -> None:
    """A gap lasts until half the queue is free, so that long and short pieces make one gap and one note."""
    receiver, gaps = Receiver(), []
    output = BackgroundOutput(receiver.write, note=note, on_drop=lambda: gaps.append(1), queue_bytes=30)
    output.put(b"first")
    assert receiver.entered.wait(WAIT_S)
    for size in (25, 10, 1, 10, 1):
        output.put(b"x" * size)

    assert (output.dropped, len(gaps)) == (4, 1)
    receiver.open.set()
    assert output.drain(WAIT_S)
    assert receiver.taken == [b"first", b"x" * 25, b"<4 pieces, 22 bytes>"]


def test_one_large_piece_is_taken_by_an_empty_queue() -> None:
    """A piece above the limit is not dropped for its size alone."""
    receiver = Receiver()
    receiver.open.set()
    output = BackgroundOutput(receiver.write, queue_bytes=10)

    output.put(b"x" * 100)

    assert output.drain(WAIT_S)
    assert receiver.taken == [b"x" * 100]


def test_a_failed_write_loses_its_piece_only() -> None:
    """An `OSError` of the receiver, as of a full disk, ends neither the thread nor the caller."""
    taken: list[bytes] = []

    def write(data: bytes) -> None:
        if data == b"bad":
            raise OSError("no space")
        taken.append(data)

    output = BackgroundOutput(write)
    output.put(b"bad")
    output.put(b"good")

    assert output.drain(WAIT_S)
    assert taken == [b"good"]


def test_flush_waits_without_holding_the_loop() -> None:
    """`flush` is true once everything was written, and false after its time-out."""
    receiver = Receiver()
    output = BackgroundOutput(receiver.write)
    output.put(b"a")

    async def scenario() -> tuple[bool, bool]:
        early = await output.flush(0.05)
        receiver.open.set()
        return early, await output.flush(WAIT_S)

    assert asyncio.run(scenario()) == (False, True)


def test_a_descriptor_gets_everything_and_a_closed_pipe_nothing_more() -> None:
    """A full non-blocking pipe is waited for; after its reader has gone, writes return at once."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    write = descriptor_writer(writing)
    data = os.urandom(300_000)
    thread = threading.Thread(target=write, args=(data,))
    thread.start()
    got = b""
    while len(got) < len(data):
        got += os.read(reading, 65536)
    thread.join(WAIT_S)

    assert got == data
    os.close(reading)
    write(b"nobody")
    write(b"nobody")
    os.close(writing)
