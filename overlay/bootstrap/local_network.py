"""Peers of the local network (`swarm.discover = "lan"`): who is announced there, and whether one founds or joins.

A node announces its run, its id, where it listens, and whether it is in a swarm yet; never a key. What others announce
is a rumour: an address to dial, beside the bootstraps and the remembered peers, and proven like every other. Of nodes
that start together the one with the lowest id founds, and the others wait for it. Multicast DNS itself is the door's
business (`overlay.bootstrap.mdns`).

All but `LocalNetwork.wait_for_peer`, which waits, is pure.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from overlay.addresses import Address
from overlay.ids import ID_BYTES
from overlay.kademlia.messages import PROTOCOL_VERSION

SERVICE = "_p2pnode._udp.local."
#: Multicast DNS answers within a second; a network that sleeps takes longer.
SEARCH_S = 3.0
POLL_INTERVAL_S = 0.1
#: Who said that it would found and does not answer for this long is given up.
LAN_JOIN_TIMEOUT_S = 15.0
#: More announcements than this are not remembered.
MAX_DISCOVERED = 64
#: Addresses taken from one announcement.
MAX_ADDRESSES = 4


class Announcement(NamedTuple):
    """What a node says of itself."""

    run: str
    node_id: bytes
    port: int
    joined: bool

    def properties(self) -> dict[str, str]:
        """As the text record of a service (RFC 6763 section 6)."""
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
    """The door to the local network's announcements."""

    async def start(
        self, own: Announcement, host: str, heard: Callable[[str, Mapping[str, str], Iterable[str], int], None]
    ) -> None:
        """Announce, and tell of others: `heard(name, properties, hosts, port)`. Raises `OSError`."""
        ...

    async def announce(self, own: Announcement) -> None:
        """Change what is announced."""
        ...

    async def stop(self) -> None:
        """Say that we are gone, and be still."""
        ...


def read(properties: Mapping[str, str], hosts: Iterable[str], port: int, own: Announcement) -> DiscoveredNode | None:
    """What an announcement means for us; None for junk, other runs, other versions, and ourselves."""
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
        # Of a local network, or it is not where a neighbour lives: nobody sends us elsewhere by multicast.
        if (found.is_private or found.is_link_local) and not found.is_unspecified and not found.is_multicast:
            addresses.append(address)
    if not addresses:
        return None
    return DiscoveredNode(node_id, properties.get("in") == "1", tuple(addresses[:MAX_ADDRESSES]))


class LocalNetwork:
    """Who was announced, by the name of the announcement."""

    def __init__(self, own: Announcement) -> None:
        self.own = own
        self.ignored = 0
        self._sightings: dict[str, DiscoveredNode] = {}

    def announce(self, *, port: int | None = None, joined: bool | None = None) -> Announcement:
        """Change what this node announces."""
        port = self.own.port if port is None else port
        self.own = self.own._replace(port=port, joined=self.own.joined if joined is None else joined)
        return self.own

    def on_announcement(self, name: str, properties: Mapping[str, str], hosts: Iterable[str], port: int) -> None:
        """An announcement, new or changed; junk is counted."""
        sighting = read(properties, hosts, port, self.own)
        if sighting is None or (len(self._sightings) >= MAX_DISCOVERED and name not in self._sightings):
            self.ignored += properties.get("id") != self.own.node_id.hex()
            return
        self._sightings[name] = sighting

    def addresses(self) -> list[Address]:
        """Where they say that they are."""
        every = (address for sighting in self._sightings.values() for address in sighting.addresses)
        return list(dict.fromkeys(every))

    def drop_lowest(self) -> None:
        """The one that was waited for to found has not: the next is waited for, or nobody."""
        seekers = [(each.node_id, name) for name, each in self._sightings.items() if not each.joined]
        if seekers:
            del self._sightings[min(seekers)[1]]

    def is_any_joined(self) -> bool:
        """Whether one of them is in a swarm."""
        return any(sighting.joined for sighting in self._sightings.values())

    def should_found(self) -> bool:
        """Nobody is in a swarm, and none of those that start now has a lower id."""
        lowest = min((sighting.node_id for sighting in self._sightings.values()), default=self.own.node_id)
        return not self.is_any_joined() and self.own.node_id <= lowest

    async def wait_for_peer(self) -> bool:
        """Whether there is, or soon will be, somebody to join; takes `SEARCH_S` where nobody is in a swarm."""
        for _ in range(round(SEARCH_S / POLL_INTERVAL_S)):
            if self.is_any_joined():
                return True
            await asyncio.sleep(POLL_INTERVAL_S)
        return not self.should_found()
