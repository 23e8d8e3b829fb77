"""Proofs of node ids: what they bind, and how many are made."""

from __future__ import annotations

import pytest

from p2pnode.overlay.identity import identity_from_seed
from p2pnode.overlay.kademlia.protocol import IdentityProofs

ASKER, QUESTION, HEAD = b"a" * 20, b"m" * 20, b"head"
IDENTITY = identity_from_seed(b"r" * 32)
OTHER = identity_from_seed(b"t" * 32)


@pytest.mark.parametrize(
    ("node_id", "asker", "question", "head", "expected"),
    [
        (IDENTITY.node_id, ASKER, QUESTION, HEAD, True),
        (OTHER.node_id, ASKER, QUESTION, HEAD, False),
        (IDENTITY.node_id, b"b" * 20, QUESTION, HEAD, False),
        (IDENTITY.node_id, ASKER, b"n" * 20, HEAD, False),
        (IDENTITY.node_id, ASKER, QUESTION, b"another head", False),
    ],
)
def test_a_proof_holds_for_its_id_requester_request_and_heartbeat_alone(
    node_id: bytes, asker: bytes, question: bytes, head: bytes, expected: bool
) -> None:
    """Any other id, requester, message id or heartbeat makes it void."""
    proofs = IdentityProofs(IDENTITY)
    proof = proofs.make(ASKER, QUESTION, HEAD)

    assert proofs.holds(proof, node_id, asker, question, head) is expected


@pytest.mark.parametrize("proof", [b"", bytes(95), bytes(96), bytes(97)])
def test_bytes_of_any_length_are_no_proof(proof: bytes) -> None:
    """Empty, short, zero and long bytes are refused without an exception."""
    assert not IdentityProofs(IDENTITY).holds(proof, IDENTITY.node_id, ASKER, QUESTION, HEAD)
