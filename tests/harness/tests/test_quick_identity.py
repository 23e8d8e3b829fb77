"""Known signatures: what was signed is not computed again, and nothing else is believed."""

from __future__ import annotations

from unittest import mock

from p2pnode.overlay.identity import Identity, identity_from_seed
from tests.harness.environment.quick_identity import known_signatures

SIGNER, OTHER = identity_from_seed(b"s" * 32), identity_from_seed(b"o" * 32)


def test_what_a_key_signed_is_known_to_all_and_is_its_signature() -> None:
    """The bytes are Ed25519's, and nobody computes them a second time."""
    signature = SIGNER.sign(b"data")

    with mock.patch.object(Identity, "verifies", side_effect=AssertionError), known_signatures():
        assert SIGNER.sign(b"data") == signature
        assert OTHER.verifies(SIGNER.public_key, b"data", signature)
    assert OTHER.verifies(SIGNER.public_key, b"data", signature)


def test_a_forged_a_replayed_and_a_foreign_signature_are_refused() -> None:
    """What was not signed, or by another key, is verified; what was signed elsewhere is valid all the same."""
    elsewhere = SIGNER.sign(b"elsewhere")

    with known_signatures():
        signature = SIGNER.sign(b"data")
        assert not OTHER.verifies(SIGNER.public_key, b"other data", signature)
        assert not OTHER.verifies(OTHER.public_key, b"data", signature)
        assert not OTHER.verifies(SIGNER.public_key, b"data", bytes(64))
        assert OTHER.verifies(SIGNER.public_key, b"elsewhere", elsewhere)
