"""Invented ids, contacts and heartbeats for the unit tests of the overlay."""

from __future__ import annotations

import random

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.ids import random_id
from p2pnode.overlay.peers import Contact, Heartbeat


def ids(count: int, seed: int = 1) -> list[bytes]:
    rng = random.Random(seed)
    return [random_id(rng) for _ in range(count)]


def contact(node_id: bytes, port: int = 8468) -> Contact:
    return Contact(node_id, Address("10.0.0.1", port))


def heartbeat(node_id: bytes = b"n" * 20, **changes: object) -> Heartbeat:
    values: dict[str, object] = {"incarnation": 1, "boot_id": 7, "port": 8468, **changes}
    return Heartbeat(node_id, **values)
