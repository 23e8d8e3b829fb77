"""The identity key and the count of starts in the state directory."""

from __future__ import annotations

import random

import pytest

from p2pnode.overlay.identity import UnreadableIdentity, load_identity, next_incarnation
from p2pnode.overlay.ids import distance, key_id, node_id_of, random_id_with_prefix, short
from tests.harness.environment.simulated import MemoryDisk, SeededEntropy


def test_an_identity_is_made_once_and_kept_private() -> None:
    """The second start on a directory has the same id; the key file is private; the key signs."""
    disk = MemoryDisk()
    first = load_identity(disk, SeededEntropy(1))
    second = load_identity(disk, SeededEntropy(2))

    assert first.node_id == second.node_id == node_id_of(first.public_key)
    assert disk.private["identity.key"]
    assert len(first.sign(b"data")) == 64


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33])
def test_a_damaged_identity_is_an_error_that_names_the_file(content: bytes) -> None:
    """A damaged key is never replaced by a new one."""
    disk = MemoryDisk()
    disk.write("identity.key", content)

    with pytest.raises(UnreadableIdentity, match=r"identity\.key"):
        load_identity(disk, SeededEntropy(1))
    assert disk.files["identity.key"] == content


def test_an_unreadable_identity_is_an_error() -> None:
    """A key without permission to read is an error, not a reason for a new key."""
    disk = MemoryDisk()
    disk.unreadable.add("identity.key")

    with pytest.raises(UnreadableIdentity, match="Permission denied"):
        load_identity(disk, SeededEntropy(1))


def test_incarnations_are_the_times_of_starts_and_rise() -> None:
    """Also in one second, and when the clock was set back; each is on disk before it is used, and a damaged one is an
    error."""
    disk = MemoryDisk()
    assert [next_incarnation(disk, wall_s) for wall_s in (100.9, 100.9, 40.0, 200.0)] == [100, 101, 102, 200]
    assert disk.files["incarnation"] == b"200"

    disk.write("incarnation", b"three")
    with pytest.raises(UnreadableIdentity, match="number"):
        next_incarnation(disk, 300.0)


def test_a_directory_put_back_from_a_copy_goes_on_above_what_it_used_since() -> None:
    """With the number that it had then, and without one."""
    disk = MemoryDisk()
    next_incarnation(disk, 100.0)
    backup = dict(disk.files)
    used = [next_incarnation(disk, wall_s) for wall_s in (110.0, 120.0, 130.0)]
    for files in (backup, {}):
        disk.files = dict(files)
        assert next_incarnation(disk, 140.0) > max(used)


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
