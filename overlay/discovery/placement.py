"""Who should own a key: highest-random-weight (rendezvous) ranking of node ids.

Every node that knows the same candidates ranks them the same way; a join or a leave moves only its own share.
Pure. Which nodes are candidates (eligible, alive, among the closest to the key) is the caller's knowledge.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def weight(key: bytes, node_id: bytes) -> bytes:
    """The pseudo-random weight of a node for a key; the largest owns."""
    return hashlib.blake2b(node_id, key=key[:64], digest_size=16).digest()


def rank(key: bytes, node_ids: Iterable[bytes]) -> list[bytes]:
    """The distinct ids by falling weight."""
    return sorted(dict.fromkeys(node_ids), key=lambda node_id: (weight(key, node_id), node_id), reverse=True)
