"""The UDP socket of a node: counts and drops whatever cannot be sent or received.

asyncio closes a datagram transport when a send raises anything but `OSError`, as an invalid port or address makes it
do. Besides, uvloop and asyncio check different things. So this class sends on the socket itself, and no error closes
it.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.environment import Log
from p2pnode.overlay.transport import MAX_DATAGRAM_BYTES, DatagramHandler

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
