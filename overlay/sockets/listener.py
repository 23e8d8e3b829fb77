"""Binds UDP and TCP to the same port number, and accepts TCP connections.

asyncio's server loses connections that it has accepted when it is closed, so this class has its own listening socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
from collections.abc import Callable

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.sockets.udp import RECEIVE_BUFFER_BYTES
from p2pnode.overlay.transport import PortInUse

#: Connections accepted per wake-up, before other callbacks run.
ACCEPTED_PER_TURN = 16
#: Without a descriptor none can be accepted: the kernel keeps the connections, and this is when the next is tried.
RETRY_S = 0.25
#: Connections that the kernel queues while the loop is busy.
BACKLOG = 512
#: Attempts to find a port that is free for both UDP and TCP.
FREE_PORT_TRIES = 64


def bind_pair(host: str, port: int) -> tuple[socket.socket, socket.socket, Address]:
    """A UDP socket and a listening TCP socket on the same port; `host` is a literal address.

    Port 0 takes any port that is free for both. "::" accepts IPv4 too. Raises `PortInUse` or `OSError`.
    """
    family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    tries = FREE_PORT_TRIES if port == 0 else 1
    for attempt in range(1, tries + 1):
        stream = socket.socket(family, socket.SOCK_STREAM)
        datagrams = socket.socket(family, socket.SOCK_DGRAM)
        what = "TCP"
        try:
            _prepare(stream, datagrams, family)
            stream.bind((host, port))
            bound = stream.getsockname()[1]
            stream.listen(BACKLOG)
            what = "UDP"
            datagrams.bind((host, bound))
        except OSError as error:
            stream.close()
            datagrams.close()
            if error.errno != errno.EADDRINUSE:
                raise
            if attempt == tries:
                detail = f"another process holds {what} port {port}" if port else "no port is free for UDP and TCP"
                raise PortInUse(Address(host, port), detail) from error
        else:
            return datagrams, stream, Address(host, bound)
    raise AssertionError("unreachable")


class Listener:
    """Accepts connections on a listening socket, on the running loop."""

    def __init__(self, listening: socket.socket, admit: Callable[[socket.socket, str], None]) -> None:
        """`admit` gets each connection and the host of its peer."""
        self._listening = listening
        self._admit = admit
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(listening.fileno(), self._accept)

    def close(self) -> None:
        if self._listening.fileno() >= 0:
            self._loop.remove_reader(self._listening.fileno())
            self._listening.close()

    def _resume(self) -> None:
        if self._listening.fileno() >= 0:
            self._loop.add_reader(self._listening.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_PER_TURN):
            try:
                stream, address = self._listening.accept()
            except BlockingIOError:  # no connection is left
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    # The socket stays readable: without a pause the loop would do nothing else.
                    self._loop.remove_reader(self._listening.fileno())
                    self._loop.call_later(RETRY_S, self._resume)
                return
            stream.setblocking(False)
            self._admit(stream, str(address[0]))


def _prepare(stream: socket.socket, datagrams: socket.socket, family: int) -> None:
    # Connections of a former process in TIME_WAIT must not block the port of a restarted node.
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for each in (stream, datagrams):
        each.setblocking(False)
        if family == socket.AF_INET6:
            each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    with contextlib.suppress(OSError):
        datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
