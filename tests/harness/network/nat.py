"""A NAT of the simulated network: one public address, under which the datagrams of the hosts behind it appear.

A datagram to the outside opens a port. Only its destinations may send back through that port (RFC 4787's
address-and-port-dependent filtering, as in most home routers). Outgoing streams pass, incoming ones do not. `rebind`
acts like a router that restarts or an entry that expires: every port changes.
"""

from __future__ import annotations

from p2pnode.overlay.addresses import Address

FIRST_PORT = 50000


class Nat:
    """`symmetric`: another port for each destination, so that no node can report to others where a host is.
    `first_port`: of the first host inside; as that host's own it looks from outside as if there were no NAT."""

    def __init__(self, public: str, *, symmetric: bool = False, first_port: int = FIRST_PORT) -> None:
        self.public = public
        self.symmetric = symmetric
        self._next_port = first_port
        self._ports: dict[tuple[Address, Address | None], int] = {}
        self._inside: dict[int, Address] = {}
        self._spoken_to: dict[tuple[int, Address], bool] = {}
        self.forwarded: dict[int, Address] = {}

    def outward(self, source: Address, to: Address) -> Address:
        """The public address under which an outside host sees this host."""
        key = (source, to if self.symmetric else None)
        port = self._ports.get(key)
        if port is None:
            port = self._ports[key] = self._next_port
            self._inside[port] = source
            self._next_port += 1
        self._spoken_to[port, to] = True
        return Address(self.public, port)

    def inside(self, port: int) -> Address | None:
        """Whose port it is now."""
        return self.forwarded.get(port) or self._inside.get(port)

    def forward(self, port: int, to: Address | None) -> None:
        """Datagrams and streams from any source to this port are forwarded to a host inside; None ends it."""
        if to is None:
            self.forwarded.pop(port, None)
        else:
            self.forwarded[port] = to

    def inward(self, port: int, source: Address) -> Address | None:
        """Where a datagram from outside goes; None where it is dropped."""
        if port in self.forwarded:
            return self.forwarded[port]
        return self._inside.get(port) if (port, source) in self._spoken_to else None

    def rebind(self) -> None:
        """Forget every port; the next ones are others."""
        self._ports.clear()
        self._inside.clear()
        self._spoken_to.clear()
