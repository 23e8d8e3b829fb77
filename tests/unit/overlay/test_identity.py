"""The identity key and the count of starts in the state directory."""

from __future__ import annotations

import pytest

from overlay.identity import UnreadableIdentity, load_identity, next_incarnation
from overlay.ids import node_id_of
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


def test_incarnations_count_starts() -> None:
    """1, 2, 3 …, each on disk before it is used; a damaged count is an error."""
    disk = MemoryDisk()
    assert [next_incarnation(disk) for _ in range(3)] == [1, 2, 3]
    assert disk.files["incarnation"] == b"3"

    disk.write("incarnation", b"three")
    with pytest.raises(UnreadableIdentity, match="number"):
        next_incarnation(disk)
