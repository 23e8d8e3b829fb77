"""Proofs of node ids: what they bind, and how many are made."""

from __future__ import annotations

import pytest

from p2pnode.overlay.identity import identity_from_seed
from p2pnode.overlay.kademlia.protocol import PROOFS, IdentityProofs

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
    proof = proofs.make(ASKER, QUESTION, HEAD, 0.0)

    assert proofs.holds(proof, node_id, asker, question, head) is expected


@pytest.mark.parametrize("proof", [b"", bytes(95), bytes(96), bytes(97)])
def test_bytes_of_any_length_are_no_proof(proof: bytes) -> None:
    """Empty, short, zero and long bytes are refused without an exception."""
    assert not IdentityProofs(IDENTITY).holds(proof, IDENTITY.node_id, ASKER, QUESTION, HEAD)


def test_proofs_are_made_at_a_bounded_rate() -> None:
    """A burst, then so many a second: above the rate the response has no proof."""
    proofs = IdentityProofs(IDENTITY)
    made = [bool(proofs.make(ASKER, QUESTION, HEAD, 5.0)) for _ in range(int(PROOFS.burst) + 10)]
    later = [bool(proofs.make(ASKER, QUESTION, HEAD, 5.5)) for _ in range(int(PROOFS.rate_per_s))]

    assert sum(made) == PROOFS.burst
    assert sum(later) == PROOFS.rate_per_s / 2
    assert proofs.holds(proofs.make(ASKER, QUESTION, HEAD, 9.0), IDENTITY.node_id, ASKER, QUESTION, HEAD)
