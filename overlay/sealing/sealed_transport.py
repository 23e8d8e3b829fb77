"""A transport that encrypts every datagram of a closed swarm and passes it to another transport.

Datagrams are sealed by `overlay.sealing.sealer`. Only those of members are delivered, and their source carries the
proven id (`NodeAddress`). Requests pass unchanged, because the transport below uses TLS (`overlay.sockets.transport`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.environment import Clock, Entropy, Log
from p2pnode.overlay.identity import Identity
from p2pnode.overlay.ids import short
from p2pnode.overlay.line.rate import MeasuredLine
from p2pnode.overlay.sealing.handshake import CLOCK_BOUND_S
from p2pnode.overlay.sealing.sealer import Sealer
from p2pnode.overlay.sealing.swarm_key import KeyRing
from p2pnode.overlay.transport import (
    Body,
    DatagramHandler,
    ReceivedResponse,
    RequestHandler,
    Transport,
    waits_for_none,
)


class SealedTransport:
    """Implements `overlay.transport.Transport` over another one that carries datagrams of `MAX_SEALED_BYTES`."""

    def __init__(
        self, below: Transport, identity: Identity, keys: KeyRing, run: str, *, clock: Clock, entropy: Entropy, log: Log
    ) -> None:
        self._below = below
        self._clock = clock
        self._log = log
        self._on_datagram: DatagramHandler | None = None
        self.sealer = Sealer(
            identity,
            keys,
            run,
            entropy.token,
            now=clock.monotonic(),
            wall=clock.wall(),
            clock_differs=self._warn,
        )

    def use(self, keys: KeyRing) -> None:
        """Replace the valid keys."""
        self.sealer.use(keys)

    @property
    def counters(self) -> Mapping[str, int]:
        """See `Transport.counters`; those of the sealer begin with `seal_`."""
        own = {f"seal_{name}": count for name, count in self.sealer.counters.items()}
        return {**self._below.counters, **own, "seal_pairs": self.sealer.sessions}

    @property
    def line(self) -> MeasuredLine:
        """See `Transport.line`."""
        return self._below.line

    async def open(
        self,
        on_datagram: DatagramHandler,
        on_request: RequestHandler,
        waits: Callable[[str], bool] = waits_for_none,
    ) -> Address:
        """See `Transport.open`."""
        self._on_datagram = on_datagram
        return await self._below.open(self._on_datagram_below, on_request, waits)

    def send(self, to: Address, datagram: bytes) -> None:
        """See `Transport.send`. `to` must be a `NodeAddress`: a datagram is sealed for one node."""
        self._send_all(self.sealer.seal(to, datagram, self._clock.monotonic(), self._clock.wall()))

    def request(
        self, to: Address, name: str, head: bytes, body: Body = (), *, timeout_s: float, keep: bool = True
    ) -> AbstractAsyncContextManager[ReceivedResponse]:
        """See `Transport.request`."""
        return self._below.request(to, name, head, body, timeout_s=timeout_s, keep=keep)

    def has_line_to(self, to: Address) -> bool:
        """See `Transport.has_line_to`."""
        return self._below.has_line_to(to)

    async def close(self) -> None:
        """See `Transport.close`."""
        await self._below.close()

    def _on_datagram_below(self, sealed: bytes, source: Address) -> None:
        opened = self.sealer.open(sealed, source, self._clock.monotonic(), self._clock.wall())
        if opened.send:
            self._send_all(opened.send)
        if opened.datagram and opened.source is not None and self._on_datagram is not None:
            self._on_datagram(opened.datagram, opened.source)

    def _send_all(self, datagrams: Iterable[tuple[Address, bytes]]) -> None:
        for to, datagram in datagrams:
            self._below.send(to, datagram)

    def _warn(self, node_id: bytes, ahead_s: float) -> None:
        self._log.warning(
            "clock_differs",
            peer=short(node_id),
            ahead_s=round(ahead_s, 1),
            bound_s=CLOCK_BOUND_S,
            reason="its handshakes are not answered until both clocks agree; a replayed handshake also causes this",
        )
