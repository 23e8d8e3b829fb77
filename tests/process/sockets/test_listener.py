"""Ports that are in use, and addresses that are not of this machine."""

from __future__ import annotations

import socket

import pytest

from p2pnode.overlay.transport import (
    PortInUse,
)
from tests.harness.runner.stories import run_by
from tests.process.harness.free_port import free_port
from tests.process.harness.sockets import LOCAL, Node, run

__all__ = ["run"]


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM], ids=["TCP", "UDP"])
@run_by("run")
async def test_port_in_use(kind: socket.SocketKind) -> None:
    """A port that another socket holds, for either protocol, is `PortInUse` and names the protocol."""
    with socket.socket(socket.AF_INET, kind) as holder:
        holder.bind((LOCAL, free_port()))
        if kind == socket.SOCK_STREAM:
            holder.listen()
        node = Node(LOCAL, holder.getsockname()[1])
        with pytest.raises(PortInUse, match="TCP" if kind == socket.SOCK_STREAM else "UDP"):
            await node.__aenter__()
        await node.transport.close()


@run_by("run")
async def test_an_address_that_is_not_ours() -> None:
    """An address of no interface is an `OSError`, not a port in use."""
    with pytest.raises(OSError, match=r"(?i)assign"):
        await Node("192.0.2.1", 0).__aenter__()
