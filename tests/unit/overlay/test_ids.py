"""Node ids and keys: hashes, prefixes, distances."""

from __future__ import annotations

import random

from p2pnode.overlay.ids import distance, key_id, node_id_of, random_id_with_prefix, short


def test_ids_are_prefixes_of_hashes() -> None:
    """A node id is the first 160 bits of SHA-256 of the key; a key id is SHA-1; both 20 bytes."""
    assert node_id_of(b"").hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4"
    assert key_id(b"").hex() == "da39a3ee5e6b4b0d3255bfef95601890afd80709"
    assert short(key_id(b"")) == "da39a3ee"


def test_prefixes_and_distances_agree() -> None:
    """Ids that share n bits lie closer than 2^(160 - n)."""
    rng = random.Random(3)
    for bits in (0, 1, 7, 64, 159, 160):
        prefix = rng.getrandbits(bits) if bits else 0
        one, other = (random_id_with_prefix(prefix, bits, rng) for _ in range(2))
        assert distance(one, other) < 1 << (160 - bits)
