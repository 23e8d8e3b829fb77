"""Checkpoints on disks with torn files, full disks and damaged content: the newest complete one is found."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy

from overlay.environment import Disk
from overlay.system import FolderDisk
from tests.harness.environment import MemoryDisk
from training import checkpoint
from training.checkpoint import CheckpointState
from training.encoding.codecs import Vector
from training.exchange.terms import Term
from training.layout import Layout, LayoutEntry

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

    def write(self, name: str, data: bytes, *, private: bool = False) -> None:
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
        "marks": [(4, "ab" * 20, 17), (0, "", 0)],
    }
    return CheckpointState(**(fields | other))


def vector_of(step: int) -> Vector:
    return np.arange(9, dtype=np.float32) + 100 * step


def write(disk: Disk, step: int, keep: int = 2) -> None:
    checkpoint.write(disk, state_of(step), LAYOUT, vector_of(step), keep)


def load(disk: Disk, step: int) -> Vector:
    into = np.full(9, np.nan, dtype=np.float32)
    checkpoint.read_vector(disk, state_of(step), LAYOUT, into)
    return into


def found(disk: Disk) -> int | None:
    state = checkpoint.newest(disk, Lines())
    return None if state is None else state.step


def test_a_checkpoint_comes_back_as_it_was_written() -> None:
    """State and vector, matrix, scalar and buffer are read back bit for bit."""
    disk = MemoryDisk()
    write(disk, 7)

    assert checkpoint.newest(disk, Lines()) == state_of(7)
    assert load(disk, 7).tobytes() == vector_of(7).tobytes()


def test_a_checkpoint_on_a_real_folder(tmp_path: Path) -> None:
    """The real disk returns the same, and keeps no temporary files."""
    disk = FolderDisk(tmp_path)
    for step in (1, 2, 3):
        write(disk, step)

    assert found(disk) == 3
    assert load(disk, 3).tobytes() == vector_of(3).tobytes()
    assert disk.names("checkpoints") == [
        f"checkpoints/step-000000000{step}/{name}" for step in (2, 3) for name in ("state.json", "vector.safetensors")
    ]


def test_the_vector_is_plain_safetensors() -> None:
    """Any safetensors reader can read it: tensors by canonical name in their shapes, float32."""
    disk = MemoryDisk()
    write(disk, 7)

    tensors = safetensors.numpy.load(disk.files["checkpoints/step-0000000007/vector.safetensors"])

    assert {name: (tensor.shape, str(tensor.dtype)) for name, tensor in tensors.items()} == {
        "a.weight": ((2, 3), "float32"),
        "b.scale": ((), "float32"),
        "c.mean": ((2,), "float32"),
    }


def test_the_marks_are_terms_again() -> None:
    """(number, node, version) per shard are read back as terms and versions."""
    assert state_of(1).terms() == [(Term(4, b"\xab" * 20), 17), (Term(0, b""), 0)]


def test_an_empty_disk_has_no_checkpoint() -> None:
    """The first start finds nothing and logs nothing."""
    log = Lines()

    assert checkpoint.newest(MemoryDisk(), log) is None
    assert log.lines == []


def test_the_newest_is_that_of_the_highest_step() -> None:
    """Found by step number, also where digits are added: 10 comes after 9, and 100 after 99."""
    disk = MemoryDisk()
    for step in (9, 10, 100, 99):
        write(disk, step, keep=10)

    assert found(disk) == 100


@pytest.mark.parametrize("keep_bytes", [0, 1, 10, 60])
def test_a_torn_state_is_passed_over_and_reported(keep_bytes: int) -> None:
    """A marker truncated by a power failure does not count; the checkpoint before it is used."""
    disk, log = MemoryDisk(), Lines()
    write(disk, 1)
    write(disk, 2)
    disk.tear("checkpoints/step-0000000002/state.json", keep_bytes)

    state = checkpoint.newest(disk, log)

    assert state is not None
    assert state.step == 1
    assert [(event, fields["folder"]) for event, fields in log.lines] == [
        ("checkpoint_unreadable", "checkpoints/step-0000000002")
    ]


@pytest.mark.parametrize(
    "content",
    [b"null", b"[]", b"{}", b"\xff\xfe", b'{"step": 2}', b"nonsense", b"\x00" * 400],
    ids=["null", "a list", "empty", "not UTF-8", "fields missing", "no JSON", "zeros"],
)
def test_a_state_of_anything_else_is_passed_over(content: bytes) -> None:
    """JSON of another shape, and no JSON at all, count as damaged."""
    disk = MemoryDisk()
    write(disk, 1)
    write(disk, 2)
    disk.files["checkpoints/step-0000000002/state.json"] = content

    assert found(disk) == 1


@pytest.mark.parametrize("step", [-1, "2", 2.5])
def test_impossible_values_in_a_state_are_passed_over(step: object) -> None:
    """A negative step or a step of another type is damage, not a checkpoint."""
    disk = MemoryDisk()
    write(disk, 1)
    write(disk, 2)
    name = "checkpoints/step-0000000002/state.json"
    disk.files[name] = msgspec.json.encode(msgspec.json.decode(disk.files[name]) | {"step": step})

    assert found(disk) == 1


def test_a_vector_without_its_marker_is_no_checkpoint() -> None:
    """The process was killed between the two files: the former checkpoint is used."""
    disk = MemoryDisk()
    write(disk, 1)
    write(disk, 2)
    disk.remove("checkpoints/step-0000000002/state.json")

    assert found(disk) == 1


def test_every_checkpoint_damaged_is_none() -> None:
    """If none is readable, the node starts without one, and each is logged."""
    disk, log = MemoryDisk(), Lines()
    for step in (1, 2):
        write(disk, step)
        disk.tear(f"checkpoints/step-000000000{step}/state.json")

    assert checkpoint.newest(disk, log) is None
    assert len(log.lines) == 2


def test_an_unreadable_state_is_passed_over() -> None:
    """A file without read permission counts as damaged."""
    disk = MemoryDisk()
    write(disk, 1)
    write(disk, 2)
    disk.unreadable.add("checkpoints/step-0000000002/state.json")

    assert found(disk) == 1


@pytest.mark.parametrize("keep", [1, 2, 3, 10])
def test_only_the_newest_are_kept(keep: int) -> None:
    """After many checkpoints the newest `keep` are complete, and nothing of the others is left."""
    disk = MemoryDisk()
    for step in range(1, 8):
        disk.write(f"checkpoints/step-000000000{step}/trainer.state", b"optimiser")
        write(disk, step, keep)

    kept = list(range(max(1, 8 - keep), 8))
    assert disk.names("checkpoints") == [
        f"checkpoints/step-000000000{step}/{name}"
        for step in kept
        for name in ("state.json", "trainer.state", "vector.safetensors")
    ]
    for step in kept:
        assert load(disk, step).tobytes() == vector_of(step).tobytes()


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


def test_a_checkpoint_of_the_same_step_replaces_it() -> None:
    """A node that leaves right after a checkpoint writes the step again; the newer content counts."""
    disk = MemoryDisk()
    write(disk, 3)
    checkpoint.write(disk, state_of(3, samples=99), LAYOUT, vector_of(4), 2)

    state = checkpoint.newest(disk, Lines())
    assert state is not None
    assert state.samples == 99
    assert load(disk, 3).tobytes() == vector_of(4).tobytes()


@pytest.mark.parametrize("room", [0, 1])
def test_a_full_disk_leaves_the_former_checkpoints_complete(room: int) -> None:
    """Full at the vector or at the marker: `OSError`, and both former ones can still be loaded."""
    disk = FullAfter()
    write(disk, 1)
    write(disk, 2)
    disk.room = room

    with pytest.raises(OSError, match="No space left"):
        write(disk, 3)

    assert found(disk) == 2
    for step in (1, 2):
        assert load(disk, step).tobytes() == vector_of(step).tobytes()


def test_a_failed_attempt_does_not_stay_for_ever() -> None:
    """A disk that was full at the marker must not keep a vector file of every attempt."""
    disk = FullAfter()
    write(disk, 1)
    for step in (2, 3, 4):
        disk.room = 1
        with pytest.raises(OSError):
            write(disk, step)
    disk.room = 1_000
    write(disk, 5)
    write(disk, 6)

    assert [name for name in disk.names("checkpoints") if name.endswith(".safetensors")] == [
        "checkpoints/step-0000000005/vector.safetensors",
        "checkpoints/step-0000000006/vector.safetensors",
    ]


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
    disk.write("checkpoints/step-0000000001/trainer.state", b"optimiser")
    write(disk, 1)
    write(disk, 2)
    disk.left = removals - 1
    with pytest.raises(KeyboardInterrupt):
        write(disk, 3)

    whole = {name.split("/")[1] for name in disk.names("checkpoints") if name.endswith("state.json")}
    for folder in sorted(whole):
        assert f"checkpoints/{folder}/vector.safetensors" in disk.files
    assert found(disk) == 3


# -- reading the vector -----------------------------------------------------------------------------------------------


def replaced(tensors: dict[str, Vector]) -> MemoryDisk:
    """A checkpoint of step 1 with these tensors in its file."""
    disk = MemoryDisk()
    write(disk, 1)
    disk.files["checkpoints/step-0000000001/vector.safetensors"] = safetensors.numpy.save(tensors)
    return disk


def tensors_without(*missing: str) -> dict[str, Vector]:
    return {entry.name: np.ones(entry.shape, np.float32) for entry in LAYOUT.entries if entry.name not in missing}


@pytest.mark.parametrize("name", ["a.weight", "b.scale", "c.mean"])
def test_a_missing_tensor_is_named(name: str) -> None:
    """Each tensor of the layout must be there."""
    with pytest.raises(ValueError, match=name):
        load(replaced(tensors_without(name)), 1)


def test_a_tensor_of_another_size_is_named() -> None:
    """A tensor with more or fewer values than in the layout is refused, not truncated or padded."""
    for size in (0, 1, 3, 200):
        with pytest.raises(ValueError, match=r"c\.mean"):
            load(replaced(tensors_without() | {"c.mean": np.ones(size, np.float32)}), 1)


def test_tensors_beyond_the_layout_are_passed_over() -> None:
    """Additional tensors in the file do no harm."""
    disk = replaced(tensors_without() | {"z.extra": np.ones(5, np.float32)})

    assert load(disk, 1).tolist() == [1.0] * 9


@pytest.mark.parametrize("keep_bytes", [0, 1, 8, 40, 200])
def test_a_torn_vector_is_a_value_error(keep_bytes: int) -> None:
    """A file truncated anywhere, in its header or its data, raises an error."""
    disk = MemoryDisk()
    write(disk, 1)
    disk.tear("checkpoints/step-0000000001/vector.safetensors", keep_bytes)

    with pytest.raises(ValueError, match="damaged"):
        load(disk, 1)


def test_a_missing_vector_is_a_value_error() -> None:
    """A marker alone loads nothing."""
    disk = MemoryDisk()
    write(disk, 1)
    disk.remove("checkpoints/step-0000000001/vector.safetensors")

    with pytest.raises(ValueError, match="missing"):
        load(disk, 1)


def test_a_vector_that_does_not_fit_changes_nothing() -> None:
    """`into` is the trainer's shared memory with the model's initial values: all of it is replaced, or none."""
    into = np.full(9, -1.0, dtype=np.float32)

    with pytest.raises(ValueError):
        checkpoint.read_vector(replaced(tensors_without("c.mean")), state_of(1), LAYOUT, into)

    assert into.tolist() == [-1.0] * 9
