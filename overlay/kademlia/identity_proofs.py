"""Proof of a node id: a signature by the key whose hash is the id.

The proof signs the message id of the request, the id of the requester, and the heartbeat of the response. The message
id is 20 random bytes, so no earlier proof fits. The heartbeat has the start and the claimed address. A node enters a
table, moves to another address or counts as restarted only with a proof. Only a proof shows that another process uses
this node's identity. A proof does not bind later datagrams; the seal does (`overlay.sealing`).

Pure. Keeps one count: a signature costs tens of microseconds and any node may request one, so their rate is limited.
"""

from __future__ import annotations

from p2pnode.overlay.identity import Identity
from p2pnode.overlay.ids import node_id_of
from p2pnode.overlay.kademlia.messages import PROOF_BYTES
from p2pnode.overlay.rate_limits import RateLimit, TokenBucket

PUBLIC_KEY_BYTES = 32
CONTEXT = b"p2pnode proof\0"
#: At about 30 µs each, signing takes at most 3 % of a core; the burst lets a thousand nodes join at once.
PROOFS = RateLimit(1000.0, 2000.0)


class IdentityProofs:
    """Makes the proofs of this node and checks those of others."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._bucket = TokenBucket(PROOFS, 0.0)

    def make(self, asker: bytes, message_id: bytes, head: bytes, now: float) -> bytes:
        """The proof for one request; empty above the rate limit."""
        if self._bucket.take(now):
            return b""
        return self._identity.public_key + self._identity.sign(_statement(asker, message_id, head))

    def holds(self, proof: bytes, node_id: bytes, asker: bytes, message_id: bytes, head: bytes) -> bool:
        """Whether `node_id` itself answered this request with this head (`overlay.kademlia.messages.encode_head`)."""
        if len(proof) != PROOF_BYTES:
            return False
        public_key, signature = proof[:PUBLIC_KEY_BYTES], proof[PUBLIC_KEY_BYTES:]
        if node_id_of(public_key) != node_id:
            return False
        return self._identity.verifies(public_key, _statement(asker, message_id, head), signature)


def _statement(asker: bytes, message_id: bytes, head: bytes) -> bytes:
    return CONTEXT + asker + message_id + head
