"""Which congestion control a connection asks for."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from p2pnode.overlay.sockets.connection import Connection
from tests.unit.overlay.sockets.wire import SocketWire


class Socket:
    """Records what is set; refuses where the kernel would."""

    def __init__(self, *, allows: bool) -> None:
        self.allows = allows
        self.options: list[tuple[Any, ...]] = []

    def setsockopt(self, *option: Any) -> None:
        self.options.append(option)
        if not self.allows:
            raise PermissionError("not an allowed congestion control")


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="this system has one congestion control")
@pytest.mark.parametrize(("host", "is_asked"), [("192.0.2.7", True), ("127.0.0.1", False), ("::1", False)])
@pytest.mark.parametrize("allows", [True, False])
def test_bbr_is_asked_for_beyond_the_loopback(host: str, is_asked: bool, allows: bool) -> None:
    """A connection to another machine asks for the control that keeps queues short, and goes on where it is refused."""

    async def main() -> None:
        wire, sock = SocketWire(), Socket(allows=allows)
        wire._extra.update(socket=sock, peername=(host, 9))
        Connection().connection_made(wire)
        wanted = [(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")]
        assert sock.options == (wanted if is_asked else [])

    asyncio.run(main())
