"""Identity, incarnation, genesis and record in the state directory."""

from __future__ import annotations

import pytest

from p2pnode.config.directory_record import RECORD_FILE, Given
from p2pnode.errors import ExitCode, UserError
from p2pnode.lifecycle.state_directory import GENESIS_FILE, StateDirectory
from tests.harness.environment.simulated import MemoryDisk, make_environment
from tests.harness.environment.virtual_loop import run
from tests.harness.trainers.stub_trainer import plain_layout

GENESIS = b"genesis of a run"


class FullDisk(MemoryDisk):
    """Reads, but cannot write."""

    def write(self, name: str, data: bytes, *, private: bool = False, is_synced: bool = True) -> None:
        raise OSError(28, "No space left on device")


def opened(disk: MemoryDisk) -> StateDirectory:
    """The directory on a disk, as a start opens it."""

    async def story() -> StateDirectory:
        return StateDirectory("state", make_environment(disk=disk))

    return run(story(), limit_s=60)


def test_identity_and_genesis_stay_and_the_incarnation_rises() -> None:
    """A second start has the same identity and genesis, and the next incarnation."""
    disk = MemoryDisk()
    first = opened(disk)
    assert first.genesis is None
    run(first.keep_genesis(GENESIS))

    second = opened(disk)

    assert second.identity.node_id == first.identity.node_id
    assert second.genesis == GENESIS
    assert second.incarnation == first.incarnation + 1


def test_a_directory_that_cannot_be_written_is_an_error_of_the_user() -> None:
    """The error has the exit code of the state directory and the system's reason."""
    with pytest.raises(UserError, match="No space left") as refused:
        opened(FullDisk())

    assert refused.value.exit_code == ExitCode.STATE_DIRECTORY


def test_the_shards_of_the_run_are_kept() -> None:
    """Those of the last swarm that had some; a start without a model leaves them."""
    disk = MemoryDisk()
    assert opened(disk).record.shards == 0
    run(opened(disk).remember("digits", GENESIS, plain_layout(100), founder=True, given={}, shards=8))
    run(opened(disk).remember("digits", GENESIS, None, founder=True, given={}))

    assert opened(disk).record.shards == 8


def test_a_directory_belongs_to_the_run_and_model_of_the_first_swarm() -> None:
    """`remember` keeps run, genesis, model, role and settings; a founder stays one; another model is then refused with
    what to do, the same one is not."""
    disk = MemoryDisk()
    layout, given = plain_layout(100), {"node.port": Given(9000, on_command_line=True)}
    run(opened(disk).remember("digits", GENESIS, layout, founder=True, given=given))

    later = opened(disk)
    assert (later.record.run, later.record.founder, later.genesis) == ("digits", True, GENESIS)
    assert later.record.settings == {"node.port": 9000}
    later.check_model(layout)
    with pytest.raises(UserError, match="belongs to another model") as refused:
        later.check_model(plain_layout(200))
    assert refused.value.exit_code == ExitCode.MISMATCH
    assert "--state-dir" in refused.value.hint
    assert "p2pnode forget" in refused.value.hint

    run(later.remember("digits", GENESIS, layout, founder=False, given={}))
    assert (opened(disk).record.founder, opened(disk).record.settings) == (True, {"node.port": 9000})


def test_the_record_is_written_before_the_genesis() -> None:
    """A crash between the two leaves a member without a genesis: one with a genesis and no record counts as a
    founder."""
    disk = MemoryDisk()
    directory = opened(disk)
    order: list[str] = []
    write = disk.write

    def watched(name: str, data: bytes, *, private: bool = False) -> None:
        order.append(name)
        write(name, data, private=private)

    disk.write = watched  # type: ignore[method-assign]
    run(directory.remember("digits", GENESIS, plain_layout(100), founder=False, given={}))

    assert order == [RECORD_FILE, GENESIS_FILE]


def test_a_damaged_record_is_one_sentence() -> None:
    """The error names file and directory and what to do; the start goes no further."""
    disk = MemoryDisk()
    disk.write(RECORD_FILE, b"{")

    with pytest.raises(UserError, match="in the state directory state: ") as refused:
        opened(disk)

    assert refused.value.exit_code == ExitCode.STATE_DIRECTORY
