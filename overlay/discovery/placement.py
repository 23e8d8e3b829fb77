"""Placement of keys: weighted highest-random-weight (rendezvous) ranking of node ids.

Thaler and Ravishankar 1998; with weights the logarithm method of Schindelhauer and Schomaker 2005: a node with hash
u in (0, 1) and weight w has the cost −ln(u)/w, and the least cost ranks first. So a node ranks first for a share of
keys in proportion to its weight, and a change of one weight moves only keys to or from that node.

Nodes that know the same candidates and the same capacity classes rank them the same way, on every machine: weights are
powers of two and the logarithm is an integer, computed bit by bit. With equal weights the order is that of the hashes.
The caller chooses the candidates: eligible, alive, among the closest to the key. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache

from p2pnode.overlay.line.capacity import MAX_CLASSES_ABOVE, weight_exponents

#: Bits of a logarithm after the point.
_FRACTION_BITS = 32
#: A node under the floor is a candidate only where fewer others are: an owner and a backup.
MIN_CANDIDATES = 2


@lru_cache(maxsize=1 << 16)  # asked twice a second for each shard that a node owns
def weight(key: bytes, node_id: bytes) -> bytes:
    """The pseudo-random weight of a node for a key; of nodes of one capacity the one with the largest owns it."""
    return hashlib.blake2b(node_id, key=key[:64], digest_size=16).digest()


def rank(key: bytes, node_ids: Iterable[bytes], capacities: Mapping[bytes, int] | None = None) -> list[bytes]:
    """The distinct ids, best first.

    `capacities` are their announced capacity classes (`overlay.line.capacity`), 0 where unknown. Nodes under the floor
    are left out, unless fewer than `MIN_CANDIDATES` others remain; then they come last.
    """
    nodes, announced = list(dict.fromkeys(node_ids)), capacities or {}
    found = _exponents(tuple([announced.get(node_id, 0) for node_id in nodes]))
    if not any(found) and None not in found:
        return sorted(nodes, key=lambda node_id: (weight(key, node_id), node_id), reverse=True)
    exponents = dict(zip(nodes, found, strict=True))

    def order(node_id: bytes) -> tuple[int, bytes, bytes]:
        exponent = exponents[node_id]
        cost, hashed = _cost(key, node_id)
        return -(cost << (MAX_CLASSES_ABOVE - (exponent or 0))), hashed, node_id

    above = sorted((node_id for node_id in nodes if exponents[node_id] is not None), key=order, reverse=True)
    if len(above) >= MIN_CANDIDATES:
        return above
    return above + sorted((node_id for node_id in nodes if exponents[node_id] is None), key=order, reverse=True)


@lru_cache(maxsize=1024)  # hardly ever another than for the shard before
def _exponents(announced: tuple[int, ...]) -> tuple[int | None, ...]:
    """`weight_exponents` of nodes that announce these classes, in their order."""
    found = weight_exponents({number.to_bytes(4, "big"): value for number, value in enumerate(announced)})
    return tuple(found.values())


@lru_cache(maxsize=1 << 16)
def _cost(key: bytes, node_id: bytes) -> tuple[int, bytes]:
    """−log₂ of the hash as a number in (0, 1), in units of 2⁻³², and the hash. A larger hash never costs more."""
    hashed = weight(key, node_id)
    return _negative_log2(int.from_bytes(hashed[:8], "big")), hashed


def _negative_log2(hash64: int) -> int:
    """−log₂((h + ½) / 2⁶⁴) in units of 2⁻³², for h from 0 to 2⁶⁴ − 1; never rises with h.

    Each bit after the point of a logarithm is whether the square of the mantissa is 2 or more. Squaring and dropping
    the same low bits keep the order of two mantissas, so the bits of the larger one are never the smaller number.
    """
    number = 2 * hash64 + 1
    whole = number.bit_length() - 1
    mantissa = number << (64 - whole) if whole <= 64 else number >> (whole - 64)
    fraction = 0
    for _ in range(_FRACTION_BITS):
        mantissa = mantissa * mantissa >> 64
        bit = mantissa >> 65
        mantissa >>= bit
        fraction = fraction << 1 | bit
    return (65 << _FRACTION_BITS) - (whole << _FRACTION_BITS | fraction)
