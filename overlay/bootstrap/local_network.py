"""Discovery in the local network (`swarm.discover = "lan"`): the nodes announced, and whether to found or join.

A node announces its run, its id, where it listens, and whether it is in a swarm; never a key. Announcements of others
are unauthenticated: they only give addresses to dial, and `hello` verifies the node there as any other. Of nodes that
start together, the one with the lowest id founds and the others wait for it. `overlay.bootstrap.mdns` implements
multicast DNS.

All but `LocalNetwork.wait_for_peer`, which waits, is pure.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.ids import ID_BYTES
from p2pnode.overlay.kademlia.messages import PROTOCOL_VERSION

SERVICE = "_p2pnode._udp.local."
#: Multicast DNS answers within a second; a sleeping network takes longer.
SEARCH_S = 3.0
POLL_INTERVAL_S = 0.1
#: Longest wait to join through the node that should found.
LAN_JOIN_TIMEOUT_S = 15.0
#: Further announcements are ignored.
MAX_DISCOVERED = 64
#: Most addresses used of one announcement.
MAX_ADDRESSES = 4


class Announcement(NamedTuple):
    """What a node announces of itself."""

    run: str
    node_id: bytes
    port: int
    joined: bool

    def properties(self) -> dict[str, str]:
        """The text record of the service (RFC 6763 section 6)."""
        return {
            "v": str(PROTOCOL_VERSION),
            "run": self.run,
            "id": self.node_id.hex(),
            "in": "1" if self.joined else "0",
        }


class DiscoveredNode(NamedTuple):
    """A node that was announced."""

    node_id: bytes
    joined: bool
    addresses: tuple[Address, ...]


class Lan(Protocol):
    """Sends and receives the announcements of the local network."""

    async def start(
        self,
        own: Announcement,
        host: str,
        on_announcement: Callable[[str, Mapping[str, str], Iterable[str], int], None],
    ) -> None:
        """Announce this node, and call `on_announcement(name, properties, hosts, port)` for others. Raises
        `OSError`."""
        ...

    async def announce(self, own: Announcement) -> None:
        """Change what is announced."""
        ...

    async def stop(self) -> None:
        """Withdraw the announcement, and stop listening."""
        ...


def read(properties: Mapping[str, str], hosts: Iterable[str], port: int, own: Announcement) -> DiscoveredNode | None:
    """The node that an announcement describes; None if it is malformed, of another run or version, or of this node."""
    if properties.get("v") != str(PROTOCOL_VERSION) or properties.get("run") != own.run:
        return None
    try:
        node_id = bytes.fromhex(properties.get("id", ""))
    except ValueError:
        return None
    if len(node_id) != ID_BYTES or node_id == own.node_id:
        return None
    addresses = []
    for host in hosts:
        try:
            address = Address.checked(host, port)
        except ValueError:
            continue
        found = ipaddress.ip_address(address.host)
        # Only local addresses count: a forged announcement must not make this node dial other networks.
        if (found.is_private or found.is_link_local) and not found.is_unspecified and not found.is_multicast:
            addresses.append(address)
    if not addresses:
        return None
    return DiscoveredNode(node_id, properties.get("in") == "1", tuple(addresses[:MAX_ADDRESSES]))


class LocalNetwork:
    """The nodes that were announced, by the name of the announcement."""

    def __init__(self, own: Announcement) -> None:
        self.own = own
        self.ignored = 0
        self._discovered: dict[str, DiscoveredNode] = {}

    def announce(self, *, port: int | None = None, joined: bool | None = None) -> Announcement:
        """Change what this node announces."""
        port = self.own.port if port is None else port
        self.own = self.own._replace(port=port, joined=self.own.joined if joined is None else joined)
        return self.own

    def on_announcement(self, name: str, properties: Mapping[str, str], hosts: Iterable[str], port: int) -> None:
        """Take in a new or changed announcement; count those that are ignored."""
        node = read(properties, hosts, port, self.own)
        if node is None or (len(self._discovered) >= MAX_DISCOVERED and name not in self._discovered):
            self.ignored += properties.get("id") != self.own.node_id.hex()
            return
        self._discovered[name] = node

    def addresses(self) -> list[Address]:
        """The announced addresses."""
        addresses = (address for node in self._discovered.values() for address in node.addresses)
        return list(dict.fromkeys(addresses))

    def drop_lowest(self) -> None:
        """Remove the node that should have founded but did not; the one with the next id takes its place."""
        waiting = [(node.node_id, name) for name, node in self._discovered.items() if not node.joined]
        if waiting:
            del self._discovered[min(waiting)[1]]

    def is_any_joined(self) -> bool:
        """Whether any announced node is in a swarm."""
        return any(node.joined for node in self._discovered.values())

    def should_found(self) -> bool:
        """Whether this node founds: no announced node is in a swarm or has a lower id."""
        lowest = min((node.node_id for node in self._discovered.values()), default=self.own.node_id)
        return not self.is_any_joined() and self.own.node_id <= lowest

    async def wait_for_peer(self) -> bool:
        """Whether there is, or soon will be, a node to join; takes `SEARCH_S` while none is in a swarm."""
        for _ in range(round(SEARCH_S / POLL_INTERVAL_S)):
            if self.is_any_joined():
                return True
            await asyncio.sleep(POLL_INTERVAL_S)
        return not self.should_found()
