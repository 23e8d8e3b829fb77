"""The package's own `Server` and `KademliaProtocol`, unchanged, on an in-memory network, to show their faults.

Datagrams arrive one iteration of the loop later, except those that `lost` selects. Time-outs are the package's five
seconds, so run it on a virtual loop.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

import umsgpack
from kademlia.network import Server
from kademlia.node import Node

Place = tuple[str, int]


class StockNetwork:
    """Servers of the package by address, and hostile nodes beside them."""

    def __init__(self) -> None:
        self.servers: dict[Place, Server] = {}
        self.sent: list[tuple[Place, Place, bytes]] = []
        self.lost: Callable[[Place, Place, bytes], bool] = lambda _source, _to, _data: False
        self._receivers: dict[Place, Callable[[bytes, Place], None]] = {}

    def server(self, number: int, **arguments: Any) -> Server:
        """A server at 10.1.0.`number`, with an id that follows from the number."""
        place = (f"10.1.0.{number}", 8468)
        arguments.setdefault("node_id", hashlib.sha1(b"stock %d" % number).digest())
        server = Server(**arguments)
        server.protocol = server._create_protocol()
        server.protocol.connection_made(_Way(self, place))
        server.place = place
        self.servers[place] = server
        self._receivers[place] = server.protocol.datagram_received
        return server

    def kill(self, server: Server) -> None:
        del self._receivers[server.place]
        del self.servers[server.place]

    def hostile_node(self, number: int, answer: Callable[[str], Any]) -> Place:
        """A node that answers each call, by its name, with whatever the test gives."""
        place = (f"10.1.0.{number}", 8468)

        def receive(data: bytes, source: Place) -> None:
            if data[:1] == b"\x00":
                name, _ = umsgpack.unpackb(data[21:])
                self.carry(place, source, b"\x01" + data[1:21] + umsgpack.packb(answer(name)))

        self._receivers[place] = receive
        return place

    def carry(self, source: Place, to: Place, data: bytes) -> None:
        self.sent.append((source, to, data))
        receiver = self._receivers.get(to)
        if receiver is not None and not self.lost(source, to, data):
            asyncio.get_running_loop().call_soon(receiver, data, source)

    async def swarm(self, count: int) -> list[Server]:
        """Servers 1 … `count`, all bootstrapped through the first."""
        servers = [self.server(number) for number in range(1, count + 1)]
        for server in servers[1:]:
            await server.bootstrap([servers[0].place])
        return servers


class _Way:
    """A server's datagram transport."""

    def __init__(self, network: StockNetwork, place: Place) -> None:
        self._network = network
        self._place = place

    def sendto(self, data: bytes, to: Place) -> None:
        self._network.carry(self._place, tuple(to), data)  # type: ignore[arg-type]

    def close(self) -> None:
        """Nothing to close."""


def ids_in(server: Server) -> list[bytes]:
    """The ids in a server's table."""
    return [node_id for bucket in server.protocol.router.buckets for node_id in bucket.nodes]


def known(server: Server, other: Server) -> Node | None:
    """Another server as this one's table has it."""
    for bucket in server.protocol.router.buckets:
        if other.node.id in bucket.nodes:
            return bucket.nodes[other.node.id]
    return None
