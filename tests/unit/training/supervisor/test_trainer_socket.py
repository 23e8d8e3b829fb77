"""Writing to a trainer's socket without blocking."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from p2pnode.training.supervisor.trainer_socket import TrainerSocket
from p2pnode.training.trainer_link.engine_messages import CallReceived
from p2pnode.training.trainer_link.messages import Decoder, Ready, encode
from tests.harness.runner.stories import run_by


def of_size(size: int) -> CallReceived:
    return CallReceived(size, b"n" * 20, b"x" * size)


def pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs


@run_by(asyncio.run)
async def test_what_the_socket_does_not_take_follows_in_order() -> None:
    """Messages larger than the buffer of the socket arrive whole and in order, and `send` waits for nothing."""
    ours, theirs = pair()
    link, decoder = TrainerSocket(ours), Decoder()
    sent = [of_size(size) for size in (10, 3_000_000, 1, 500_000, 20)]
    for message in sent:
        link.send(message)
    received = []
    while len(received) < len(sent):
        received += decoder.from_daemon(await asyncio.get_running_loop().sock_recv(theirs, 1 << 20))
    assert received == sent
    link.send(of_size(5))
    assert decoder.from_daemon(await asyncio.get_running_loop().sock_recv(theirs, 1 << 20)) == [of_size(5)]
    await link.close()
    theirs.close()


@run_by(asyncio.run)
async def test_messages_of_the_trainer_come_until_it_closes_the_socket() -> None:
    """Also one that came with the end."""
    ours, theirs = pair()
    link = TrainerSocket(ours)
    theirs.send(encode(Ready()))
    theirs.close()
    assert [message async for message in link.received()] == [Ready()]
    await link.close()


@run_by(asyncio.run)
async def test_descriptors_travel_with_their_message() -> None:
    """The memory that trainer and daemon share is passed with a short message."""
    ours, theirs = pair()
    reading, writing = os.pipe()
    link = TrainerSocket(ours)
    link.send(of_size(1), (writing,))

    data, descriptors, _, _ = socket.recv_fds(theirs, 100, 2)
    os.write(descriptors[0], b"x")

    assert (data, os.read(reading, 1)) == (encode(of_size(1)), b"x")
    for descriptor in (reading, writing, *descriptors):
        os.close(descriptor)
    await link.close()
    theirs.close()


@pytest.mark.parametrize("size", [1, 5_000_000])
@run_by(asyncio.run)
async def test_a_closed_socket_is_the_readers_to_notice(size: int) -> None:
    """Nothing is raised when the trainer has ended, whether at once or while more is to be written."""
    ours, theirs = pair()
    link = TrainerSocket(ours)
    if size > 1:
        link.send(of_size(size))
    theirs.close()
    link.send(of_size(1))
    await asyncio.sleep(0)
    link.send(of_size(1))
    await link.close()
