"""The real datagrams: one UDP socket that nothing can kill, and the port it shares with the stream server.

asyncio closes a datagram transport when a send raises anything but `OSError` (a hostile port or address does), and
uvloop and asyncio differ in what they check. So the socket is ours: sends are direct, and whatever the kernel or an
address does is counted and dropped. Rules for the kademlia layer above: kademlia.md, fault 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
from collections import Counter
from collections.abc import Callable

from overlay.environment import Log
from overlay.transport import MAX_DATAGRAM_BYTES, Address, DatagramHandler, PortInUse

#: Asked of the kernel for arriving datagrams: a second of a thousand peers' probes. It grants what its limits allow.
RECEIVE_BUFFER_BYTES = 4 << 20
#: Datagrams taken per wake-up before other callbacks get their turn.
DATAGRAMS_PER_TURN = 64
#: Connections taken per wake-up before other callbacks get their turn.
ACCEPTED_PER_TURN = 64
#: Connections the kernel keeps for us while the loop is busy.
BACKLOG = 512
#: A free port must be free for UDP and TCP: tried this often.
FREE_PORT_TRIES = 64


def bind_pair(host: str, port: int) -> tuple[socket.socket, socket.socket, Address]:
    """A UDP socket and a listening TCP socket on the same port; `host` is a literal address.

    With port 0 any port that is free for both. "::" takes IPv4 too. Raises `PortInUse` or `OSError`.
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
    """Takes connections off a listening socket. The loop's own server loses what it has accepted when it is closed."""

    def __init__(self, listening: socket.socket, admit: Callable[[socket.socket, str], None]) -> None:
        """`admit` gets each connection, and the host at its other end."""
        self._listening = listening
        self._admit = admit
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(listening.fileno(), self._accept)

    def close(self) -> None:
        if self._listening.fileno() >= 0:
            self._loop.remove_reader(self._listening.fileno())
            self._listening.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_PER_TURN):
            try:
                stream, address = self._listening.accept()
            except OSError:  # nobody more; or no descriptors left: the kernel keeps them, and we look again
                return
            stream.setblocking(False)
            self._admit(stream, str(address[0]))


def _prepare(stream: socket.socket, datagrams: socket.socket, family: int) -> None:
    # Connections of the process before us, waiting to be forgotten, must not keep the port from a restarted node.
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for each in (stream, datagrams):
        each.setblocking(False)
        if family == socket.AF_INET6:
            each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    with contextlib.suppress(OSError):
        datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)


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
        self._on_datagram = on_datagram
        self._log = log
        self._failures_seen: dict[str, int] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(bound.fileno(), self._on_readable)

    def send(self, to: Address, datagram: bytes) -> None:
        """Send, or count why not: too long, wrong family or no route, full buffer, odd address."""
        if len(datagram) > self._longest_bytes:
            self.counters["not_sent_long"] += 1
            self._failed("datagram_too_long", f"{len(datagram)} bytes", limit=self._longest_bytes)
            return
        host, port = to
        try:
            if self._socket.family == socket.AF_INET6 and ":" not in host:
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
            except OSError:  # a message of an earlier send's failure, not ours to mend
                continue
            if len(datagram) > self._longest_bytes:
                self.counters["dropped_long"] += 1
                continue
            self._deliver(datagram, source)
            if self._socket.fileno() < 0:  # the handler closed us
                return

    def _deliver(self, datagram: bytes, source: tuple[str, int]) -> None:
        try:
            address = Address.checked(source[0], source[1])
        except ValueError:  # source port 0: cannot be answered
            self.counters["dropped_source"] += 1
            return
        self.counters["received"] += 1
        try:
            self._on_datagram(datagram, address)
        except Exception as error:
            # Whatever a stranger's bytes do to a handler, the socket goes on.
            self._failed("datagram_handler_failed", repr(error), source=str(address))

    def _failed(self, event: str, what: str, **fields: object) -> None:
        """Log the first failure of a kind; strangers can repeat it at will."""
        kind = f"{event}/{what.split('(')[0]}"
        self._failures_seen[kind] = self._failures_seen.get(kind, 0) + 1
        if self._failures_seen[kind] == 1 and len(self._failures_seen) < 100:
            self._log.error(event, what=what, **fields)

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
