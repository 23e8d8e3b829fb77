"""Checkpoints on disks with torn files, full disks and damaged content: the newest complete one is found."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy

from p2pnode.overlay.environment import Disk
from p2pnode.overlay.system import FolderDisk
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.exchange.terms import Term
from p2pnode.training.files import checkpoint
from p2pnode.training.files.checkpoint import Checkpoint, CheckpointState
from p2pnode.training.layout import Layout, LayoutEntry
from tests.harness.environment.simulated import MemoryDisk

LAYOUT = Layout(
    (
        LayoutEntry("a.weight", (2, 3), "float32", "parameter", 0, 6),
        LayoutEntry("b.scale", (), "float32", "parameter", 6, 1),
        LayoutEntry("c.mean", (2,), "float32", "buffer", 7, 2),
    )
)


class Lines:
    """A log that is a list."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def debug(self, event: str, **fields: Any) -> None:
        self.lines.append((event, fields))

    info = warning = error = debug


class FullAfter(MemoryDisk):
    """A disk that is full after so many more writes."""

    room = 1_000

    def write(self, name: str, data: bytes, *, private: bool = False, is_synced: bool = True) -> None:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device", name)
        self.room -= 1
        super().write(name, data, private=private)


def state_of(step: int, **other: Any) -> CheckpointState:
    fields = {
        "run": "r",
        "genesis": "0a",
        "layout_digest": LAYOUT.digest(),
        "step": step,
        "samples": 10 * step,
        "optimizer_steps": 3 * step,
        "marks": [(Term(4, b"\xab" * 20), 17), (Term(0, b""), 0)],
    }
    return CheckpointState(**(fields | other))


def vector_of(step: int) -> Vector:
    return np.arange(9, dtype=np.float32) + 100 * step


def write(disk: Disk, step: int, keep: int = 2, *, vector: Vector | None = None, **other: Any) -> str:
    """A whole checkpoint, its vector in slices of four; returns its folder."""
    folder = checkpoint.new_folder(disk, step)
    values = vector_of(step) if vector is None else vector
    checkpoint.write_vector(disk, folder, LAYOUT, [values[:4], values[4:8], values[8:]])
    checkpoint.write_states(disk, folder, 0, [b"states"])
    checkpoint.finish(disk, folder, state_of(step, **other), keep)
    return folder


def load(disk: Disk, folder: str) -> Vector:
    into = np.full(9, np.nan, dtype=np.float32)
    checkpoint.read_vector(disk, folder, LAYOUT, into)
    return into


def found(disk: Disk) -> int | None:
    newest = checkpoint.newest(disk, Lines())
    return None if newest is None else newest.state.step


def folder(number: int, step: int) -> str:
    return f"checkpoints/{number:08d}-step-{step:010d}"


def test_a_checkpoint_comes_back_as_it_was_written() -> None:
    """State and vector, matrix, scalar and buffer are read back bit for bit."""
    disk = MemoryDisk()
    written = write(disk, 7)

    assert checkpoint.newest(disk, Lines()) == Checkpoint(written, state_of(7))
    assert load(disk, written).tobytes() == vector_of(7).tobytes()


def test_a_checkpoint_on_a_real_folder(tmp_path: Path) -> None:
    """The real disk returns the same, and keeps no temporary files."""
    disk = FolderDisk(tmp_path)
    for step in (1, 2, 3):
        write(disk, step)

    assert found(disk) == 3
    assert load(disk, folder(3, 3)).tobytes() == vector_of(3).tobytes()
    assert disk.names("checkpoints") == [
        f"{folder(step, step)}/{name}"
        for step in (2, 3)
        for name in ("state.json", "states-000000.bin", "vector.safetensors")
    ]


def test_the_vector_is_plain_safetensors() -> None:
    """Any safetensors reader can read it: tensors by canonical name in their shapes, float32."""
    disk = MemoryDisk()
    written = write(disk, 7)

    tensors = safetensors.numpy.load(disk.files[f"{written}/vector.safetensors"])

    assert {name: (tensor.shape, str(tensor.dtype)) for name, tensor in tensors.items()} == {
        "a.weight": ((2, 3), "float32"),
        "b.scale": ((), "float32"),
        "c.mean": ((2,), "float32"),
    }


def test_an_empty_disk_has_no_checkpoint() -> None:
    """The first start finds nothing and logs nothing."""
    log = Lines()

    assert checkpoint.newest(MemoryDisk(), log) is None
    assert log.lines == []


def test_the_newest_is_the_one_written_last() -> None:
    """Whatever its step: a new model begins at step 1 beside the checkpoints of the former one, and keeps its own."""
    disk = MemoryDisk()
    for step in (99, 100, 1, 2):
        write(disk, step)

        assert found(disk) == step

    assert sorted({name.split("/")[1] for name in disk.names("checkpoints")}) == [
        "00000003-step-0000000001",
        "00000004-step-0000000002",
    ]


def test_the_trainers_state_of_an_earlier_checkpoint_is_kept_and_found() -> None:
    """A trainer that could not save in time: its last file stays as long as a kept checkpoint names it."""
    disk = MemoryDisk()
    first = checkpoint.new_folder(disk, 1)
    disk.write(f"{first}/trainer.state", b"optimiser")
    write(disk, 1, keep=1, trainer_state=f"{first}/trainer.state")
    for step in (2, 3):
        write(disk, step, keep=1, trainer_state=f"{first}/trainer.state")
        newest = checkpoint.newest(disk, Lines())
        assert newest is not None
        assert newest.state.step == step
        assert checkpoint.trainer_state(disk, newest) == f"{first}/trainer.state"

    write(disk, 4, keep=1)
    newest = checkpoint.newest(disk, Lines())
    assert newest is not None
    assert checkpoint.trainer_state(disk, newest) == ""
    assert not [name for name in disk.names() if name.endswith("trainer.state")]


def test_a_trainers_state_that_came_after_the_marker_counts() -> None:
    """The daemon no longer waited for a long optimiser step; the trainer saved all the same before it ended."""
    disk = MemoryDisk()
    earlier = write(disk, 1)
    disk.write(f"{earlier}/trainer.state", b"earlier")
    late = write(disk, 2, trainer_state=f"{earlier}/trainer.state")
    disk.write(f"{late}/trainer.state", b"late")
    newest = checkpoint.newest(disk, Lines())

    assert newest is not None
    assert checkpoint.trainer_state(disk, newest) == f"{late}/trainer.state"


def test_an_attempt_never_writes_into_an_earlier_checkpoint() -> None:
    """Neither into a complete one of the same step nor into what a failed attempt left."""
    disk = MemoryDisk()
    first = write(disk, 5)
    failed = checkpoint.new_folder(disk, 5)
    checkpoint.write_vector(disk, failed, LAYOUT, [vector_of(5)])

    assert len({first, failed, checkpoint.new_folder(disk, 5)}) == 3


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"run":"r","genesis":"0a"', b"null", b"[]", b"{}", b"\xff\xfe", b'{"step": 2}', b"\x00" * 400]
    + [msgspec.json.encode(msgspec.to_builtins(state_of(2)) | {"step": step}) for step in (-1, "2", 2.5)],
)
def test_a_damaged_state_is_passed_over_and_reported(content: bytes) -> None:
    """A marker that is torn, of another shape or impossible does not count, nor one that cannot be read; the checkpoint
    before it is used. If none is readable, there is none."""
    disk, log = MemoryDisk(), Lines()
    first, second = write(disk, 1), write(disk, 2)
    disk.files[f"{second}/state.json"] = content

    newest = checkpoint.newest(disk, log)

    assert newest is not None
    assert newest.folder == first
    assert [(event, fields["folder"]) for event, fields in log.lines] == [("checkpoint_unreadable", second)]
    disk.unreadable.add(f"{first}/state.json")
    assert checkpoint.newest(disk, log) is None
    assert len(log.lines) == 3


def test_a_vector_without_its_marker_is_no_checkpoint() -> None:
    """The process was killed between the two files: the former checkpoint is used."""
    disk = MemoryDisk()
    write(disk, 1)
    disk.remove(f"{write(disk, 2)}/state.json")

    assert found(disk) == 1


@pytest.mark.parametrize("keep", [1, 2, 3, 10])
def test_only_the_newest_are_kept(keep: int) -> None:
    """After many checkpoints the newest `keep` are complete, and nothing of the others is left."""
    disk = MemoryDisk()
    for step in range(1, 8):
        write(disk, step, keep)

    kept = list(range(max(1, 8 - keep), 8))
    assert disk.names("checkpoints") == [
        f"{folder(step, step)}/{name}"
        for step in kept
        for name in ("state.json", "states-000000.bin", "vector.safetensors")
    ]
    for step in kept:
        assert load(disk, folder(step, step)).tobytes() == vector_of(step).tobytes()


def test_other_files_of_the_node_are_left_alone() -> None:
    """Removing old checkpoints touches no other file."""
    disk = MemoryDisk()
    for name in ("identity.key", "checkpoints-old/state.json", "peers.json"):
        disk.write(name, b"x")
    for step in range(1, 5):
        write(disk, step, keep=1)

    assert [name for name in disk.names() if not name.startswith("checkpoints/")] == [
        "checkpoints-old/state.json",
        "identity.key",
        "peers.json",
    ]


def test_of_two_checkpoints_of_one_step_the_later_counts() -> None:
    """A node that leaves right after a checkpoint writes the step again, and the earlier one stays whole."""
    disk = MemoryDisk()
    before = write(disk, 3)
    write(disk, 3, vector=vector_of(4), samples=99)

    newest = checkpoint.newest(disk, Lines())
    assert newest is not None
    assert newest.state.samples == 99
    assert load(disk, newest.folder).tobytes() == vector_of(4).tobytes()
    assert load(disk, before).tobytes() == vector_of(3).tobytes()


@pytest.mark.parametrize("room", [0, 1, 2])
def test_a_full_disk_leaves_the_former_checkpoints_complete(room: int) -> None:
    """Full at the vector, the shards or the marker: `OSError`, and both former ones can still be loaded."""
    disk = FullAfter()
    write(disk, 1)
    write(disk, 2)
    disk.room = room

    with pytest.raises(OSError, match="No space left"):
        write(disk, 3)

    assert found(disk) == 2
    for step in (1, 2):
        assert load(disk, folder(step, step)).tobytes() == vector_of(step).tobytes()


def test_a_failed_attempt_does_not_stay_for_ever() -> None:
    """A disk that was full at the marker must not keep a vector file of every attempt."""
    disk = FullAfter()
    write(disk, 1)
    for step in (2, 3, 4):
        disk.room = 1
        with pytest.raises(OSError):
            write(disk, step)
    disk.room = 1_000
    kept = [write(disk, 5), write(disk, 6)]

    assert [name for name in disk.names("checkpoints") if name.endswith(".safetensors")] == [
        f"{folder}/vector.safetensors" for folder in kept
    ]


def test_a_damaged_checkpoint_does_not_count_as_kept() -> None:
    """Beside one that cannot be read, the whole one before it stays."""
    disk = MemoryDisk()
    whole = write(disk, 1)
    disk.tear(f"{write(disk, 2)}/state.json")
    write(disk, 3)

    assert load(disk, whole).tobytes() == vector_of(1).tobytes()
    assert found(disk) == 3
    assert disk.names(folder(2, 2)) == []


@pytest.mark.parametrize("removals", [1, 2, 3])
def test_dying_while_clearing_leaves_no_half_checkpoint(removals: int) -> None:
    """The marker is removed first: the rest of an old checkpoint does not look complete."""

    class DiesWhileRemoving(MemoryDisk):
        left = 10**6

        def remove(self, name: str) -> None:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            super().remove(name)

    disk = DiesWhileRemoving()
    write(disk, 1)
    write(disk, 2)
    disk.left = removals - 1
    with pytest.raises(KeyboardInterrupt):
        write(disk, 3)

    whole = {name.split("/")[1] for name in disk.names("checkpoints") if name.endswith("state.json")}
    for name in sorted(whole):
        assert f"checkpoints/{name}/vector.safetensors" in disk.files
    assert found(disk) == 3


# -- reading the vector -----------------------------------------------------------------------------------------------


def replaced(tensors: dict[str, Vector]) -> MemoryDisk:
    """A checkpoint of step 1 with these tensors in its file."""
    disk = MemoryDisk()
    write(disk, 1)
    disk.files[f"{folder(1, 1)}/vector.safetensors"] = safetensors.numpy.save(tensors)
    return disk


def tensors_without(*missing: str) -> dict[str, Vector]:
    return {entry.name: np.ones(entry.shape, np.float32) for entry in LAYOUT.entries if entry.name not in missing}


@pytest.mark.parametrize("name", ["a.weight", "b.scale", "c.mean"])
def test_a_missing_tensor_is_named(name: str) -> None:
    """Each tensor of the layout must be there."""
    with pytest.raises(ValueError, match=name):
        load(replaced(tensors_without(name)), folder(1, 1))


def test_a_tensor_of_another_size_is_named() -> None:
    """A tensor with more or fewer values than in the layout is refused, not truncated or padded."""
    for size in (0, 1, 3, 200):
        with pytest.raises(ValueError, match=r"c\.mean"):
            load(replaced(tensors_without() | {"c.mean": np.ones(size, np.float32)}), folder(1, 1))


def test_tensors_beyond_the_layout_are_passed_over() -> None:
    """Additional tensors in the file do no harm."""
    disk = replaced(tensors_without() | {"z.extra": np.ones(5, np.float32)})

    assert load(disk, folder(1, 1)).tolist() == [1.0] * 9


@pytest.mark.parametrize("keep_bytes", [0, 1, 8, 40, 200])
def test_a_torn_vector_is_a_value_error(keep_bytes: int) -> None:
    """A file truncated anywhere, in its header or its data, raises an error."""
    disk = MemoryDisk()
    write(disk, 1)
    disk.tear(f"{folder(1, 1)}/vector.safetensors", keep_bytes)

    with pytest.raises(ValueError, match="damaged"):
        load(disk, folder(1, 1))


def test_a_missing_vector_is_a_value_error() -> None:
    """A marker alone loads nothing."""
    disk = MemoryDisk()
    write(disk, 1)
    disk.remove(f"{folder(1, 1)}/vector.safetensors")

    with pytest.raises(ValueError, match="missing"):
        load(disk, folder(1, 1))


def test_a_vector_that_does_not_fit_changes_nothing() -> None:
    """`into` is the trainer's shared memory with the model's initial values: all of it is replaced, or none."""
    into = np.full(9, -1.0, dtype=np.float32)

    with pytest.raises(ValueError):
        checkpoint.read_vector(replaced(tensors_without("c.mean")), folder(1, 1), LAYOUT, into)

    assert into.tolist() == [-1.0] * 9
