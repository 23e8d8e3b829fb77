"""Placement of keys: highest-random-weight (rendezvous) ranking of node ids (Thaler and Ravishankar 1998).

Nodes that know the same candidates rank them the same way. A join or a leave moves only the keys of that node. The
caller chooses the candidates: eligible, alive, among the closest to the key. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def weight(key: bytes, node_id: bytes) -> bytes:
    """The pseudo-random weight of a node for a key; the node with the largest weight owns it."""
    return hashlib.blake2b(node_id, key=key[:64], digest_size=16).digest()


def rank(key: bytes, node_ids: Iterable[bytes]) -> list[bytes]:
    """The distinct ids by decreasing weight."""
    return sorted(dict.fromkeys(node_ids), key=lambda node_id: (weight(key, node_id), node_id), reverse=True)
