"""Node ids and keys: 160 bits, compared by XOR.

A node id is the first 160 bits of the SHA-256 of the node's public key, so ids are uniform and cannot be chosen. A
key id is a SHA-1, as in Kademlia. Pure. Randomness is passed in.
"""

from __future__ import annotations

import hashlib
import random

NodeId = bytes

ID_BYTES = 20
ID_BITS = 8 * ID_BYTES
#: Number of ids; a distance divided by it is in (0, 1].
ID_SPACE = 1 << ID_BITS


def node_id_of(public_key: bytes) -> bytes:
    """The id that belongs to a public key."""
    return hashlib.sha256(public_key).digest()[:ID_BYTES]


def key_id(data: bytes) -> bytes:
    """The position of a key in the id space."""
    return hashlib.sha1(data, usedforsecurity=False).digest()


def distance(a: bytes, b: bytes) -> int:
    """XOR distance of two ids."""
    return int.from_bytes(a, "big") ^ int.from_bytes(b, "big")


def relative_distance(a: bytes, b: bytes) -> float:
    """Distance as a share of the id space, in (0, 1]: `(a XOR b + 1) / 2^160`."""
    return (distance(a, b) + 1) / ID_SPACE


def short(node_id: bytes) -> str:
    """First eight hexadecimal characters: what people read."""
    return node_id[:4].hex()


def random_id(rng: random.Random) -> bytes:
    """A uniform id."""
    return rng.getrandbits(ID_BITS).to_bytes(ID_BYTES, "big")


def random_id_with_prefix(prefix: int, bits: int, rng: random.Random) -> bytes:
    """A uniform id among those whose first `bits` bits are the number `prefix`."""
    rest = ID_BITS - bits
    return ((prefix << rest) | rng.getrandbits(rest) if rest else prefix).to_bytes(ID_BYTES, "big")
