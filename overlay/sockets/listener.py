"""Binds UDP and TCP to the same port number, and accepts TCP connections.

asyncio's server loses connections that it has accepted when it is closed, so this class has its own listening socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
from collections import Counter
from collections.abc import Callable

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.environment import Log
from p2pnode.overlay.transport import MAX_DATAGRAM_BYTES, DatagramHandler, PortInUse

#: Requested from the kernel, which may grant less: one second of probes from a thousand peers.
RECEIVE_BUFFER_BYTES = 4 << 20
#: Datagrams read per wake-up, before other callbacks run.
DATAGRAMS_PER_TURN = 64


class DatagramSocket:
    """A bound UDP socket on the running loop."""

    def __init__(
        self,
        bound: socket.socket,
        on_datagram: DatagramHandler,
        log: Log,
        *,
        longest_bytes: int = MAX_DATAGRAM_BYTES,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._longest_bytes = longest_bytes
        self._socket = bound
        self._is_ipv6 = bound.family == socket.AF_INET6  # a socket makes an enum of its family each time
        self._on_datagram = on_datagram
        self._log = log
        self._failures_seen: dict[str, int] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(bound.fileno(), self._on_readable)

    def send(self, to: Address, datagram: bytes) -> None:
        """Send, or count why not: too long, wrong family, no route, full buffer, invalid address."""
        if len(datagram) > self._longest_bytes:
            self.counters["not_sent_long"] += 1
            self._failed("datagram_too_long", f"{len(datagram)} bytes", limit=self._longest_bytes)
            return
        host, port = to
        try:
            if self._is_ipv6 and ":" not in host:
                host = f"::ffff:{host}"
            self._socket.sendto(datagram, (host, port))
        except (BlockingIOError, InterruptedError):
            self.counters["not_sent_buffer_full"] += 1
        except OSError:
            self.counters["not_sent_no_way"] += 1
        except (ValueError, TypeError, OverflowError):
            self.counters["not_sent_bad_address"] += 1
        else:
            self.counters["sent"] += 1

    def _on_readable(self) -> None:
        for _ in range(DATAGRAMS_PER_TURN):
            try:
                datagram, source = self._socket.recvfrom(self._longest_bytes + 1)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # reports that an earlier send failed
                continue
            if len(datagram) > self._longest_bytes:
                self.counters["dropped_long"] += 1
                continue
            self._deliver(datagram, source)
            if self._socket.fileno() < 0:  # the handler closed this socket
                return

    def _deliver(self, datagram: bytes, source: tuple[str, int]) -> None:
        try:
            address = Address.checked(source[0], source[1])
        except ValueError:  # source port 0 cannot be answered
            self.counters["dropped_source"] += 1
            return
        self.counters["received"] += 1
        try:
            self._on_datagram(datagram, address)
        except Exception as error:
            # No bytes from the network may stop the socket.
            self._failed("datagram_handler_failed", repr(error), source=str(address))

    def _failed(self, event: str, what: str, **fields: object) -> None:
        """Log the first failure of each kind: any peer can cause more."""
        kind = f"{event}/{what.split('(')[0]}"
        self._failures_seen[kind] = self._failures_seen.get(kind, 0) + 1
        if self._failures_seen[kind] == 1 and len(self._failures_seen) < 100:
            self._log.error(event, what=what, **fields)

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()


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
