"""Identity, incarnation and genesis in the state directory."""

from __future__ import annotations

import pytest

from p2pnode.errors import ExitCode, UserError
from p2pnode.lifecycle.state_directory import StateDirectory
from tests.harness.environment import MemoryDisk, SeededEntropy


class FullDisk(MemoryDisk):
    """Reads, but cannot write."""

    def write(self, name: str, data: bytes, *, private: bool = False) -> None:
        raise OSError(28, "No space left on device")


def opened(disk: MemoryDisk) -> StateDirectory:
    return StateDirectory("state", disk, SeededEntropy(1))


def test_identity_and_genesis_stay_and_the_incarnation_rises() -> None:
    """A second start has the same identity and genesis, and the next incarnation."""
    disk = MemoryDisk()
    first = opened(disk)
    assert first.genesis is None
    first.keep_genesis(b"genesis")

    second = opened(disk)

    assert second.identity.node_id == first.identity.node_id
    assert second.genesis == b"genesis"
    assert second.incarnation == first.incarnation + 1


def test_a_raised_incarnation_is_kept_for_the_next_start() -> None:
    """After `raise_incarnation` this start and the next one are above the given number."""
    disk = MemoryDisk()
    directory = opened(disk)

    directory.raise_incarnation(above=41)

    assert directory.incarnation == 42
    assert opened(disk).incarnation == 43


def test_a_directory_that_cannot_be_written_is_an_error_of_the_user() -> None:
    """The error has the exit code of the state directory and the system's reason."""
    with pytest.raises(UserError, match="No space left") as refused:
        opened(FullDisk())

    assert refused.value.exit_code == ExitCode.STATE_DIRECTORY
