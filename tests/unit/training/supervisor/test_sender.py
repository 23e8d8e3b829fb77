"""Writing to a trainer's socket without blocking."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from p2pnode.training.supervisor.session import SocketSender
from tests.harness.runner.stories import run_by


async def received(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        found += await asyncio.get_running_loop().sock_recv(connection, 1 << 20)
    return found


def pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs


@run_by(asyncio.run)
async def test_what_the_socket_does_not_take_follows_in_order() -> None:
    """Messages larger than the buffer of the socket arrive whole and in order, and `send` waits for nothing."""
    ours, theirs = pair()
    sender = SocketSender(ours)
    messages = [bytes([number]) * size for number, size in enumerate((10, 3_000_000, 1, 500_000, 20))]
    for message in messages:
        sender.send(message)
    assert await received(theirs, sum(map(len, messages))) == b"".join(messages)
    sender.send(b"later")
    assert await received(theirs, 5) == b"later"
    await sender.stop()
    ours.close()
    theirs.close()


def test_descriptors_travel_with_their_message() -> None:
    """The memory that trainer and daemon share is passed with a short message."""
    ours, theirs = pair()
    reading, writing = os.pipe()
    SocketSender(ours).send(b"memory", (writing,))

    data, descriptors, _, _ = socket.recv_fds(theirs, 100, 2)
    os.write(descriptors[0], b"x")

    assert (data, os.read(reading, 1)) == (b"memory", b"x")
    for descriptor in (reading, writing, *descriptors):
        os.close(descriptor)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("size", [1, 5_000_000])
@run_by(asyncio.run)
async def test_a_closed_socket_is_the_readers_to_notice(size: int) -> None:
    """Nothing is raised when the trainer has ended, whether at once or while more is to be written."""
    ours, theirs = pair()
    sender = SocketSender(ours)
    if size > 1:
        sender.send(b"x" * size)
    theirs.close()
    sender.send(b"x")
    await asyncio.sleep(0)
    sender.send(b"x")
    await sender.stop()
    ours.close()
