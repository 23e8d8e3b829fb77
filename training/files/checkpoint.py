"""Checkpoints on disk: written in pieces, complete with their marker, and read from the one that was written last.

A checkpoint is the folder `checkpoints/W-step-N`: W counts the checkpoints ever begun on this disk, N is the step. What
was written last counts, whatever its step: a new model begins at step 0 beside the last checkpoints of the former one.
The files are `vector.safetensors` (every tensor by its canonical name, float32), `trainer.state` (written by the
trainer: optimiser, schedule, random state, data position; those of further ranks or devices are `trainer.state.1` and
so on; if it could not be saved in time, `state.json` names that of an earlier checkpoint), `states-N.bin` (the shards
that the node owned and backed up, see `training.exchange.store.shard_states`), and `state.json`. That one is written
last and marks the others as complete.

All functions block and belong into a thread. They raise `OSError`, and leave the earlier checkpoints as they were.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from p2pnode.overlay.environment import Disk, Log
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.exchange.store.records import StoredState
from p2pnode.training.exchange.store.shard_states import BadStates, decode
from p2pnode.training.exchange.terms import Term
from p2pnode.training.files.model_file import BadModelFile, TensorFile, TensorInfo, header
from p2pnode.training.layout import Layout

FOLDER = "checkpoints"
VECTOR_FILE = "vector.safetensors"
TRAINER_FILE = "trainer.state"
MARKER = "state.json"
#: Checkpoints kept.
KEPT = 2

_NAME = re.compile(r"(\d+)-step-(\d+)")


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """`state.json`. `marks` are the term and version of each shard of the vector.

    `trainer_state` names the file of the trainer's own state, below the state directory; empty: there is none.
    """

    run: str
    genesis: str
    layout_digest: str
    step: Annotated[int, Meta(ge=0)]
    samples: int
    optimizer_steps: int
    marks: list[tuple[Term, int]]
    trainer_state: str = ""


class Checkpoint(NamedTuple):
    """A complete checkpoint: its folder below the state directory, and its `state.json`."""

    folder: str
    state: CheckpointState


# -- writing -------------------------------------------------------------------------------------------------------


def new_folder(disk: Disk, step: int) -> str:
    """The folder for a new checkpoint: no earlier one, complete or not, has its number."""
    written = [_order(folder) for folder in _folders(disk.names(FOLDER))]
    return f"{FOLDER}/{max((number for number, _ in written), default=0) + 1:08d}-step-{step:010d}"


def write_vector(disk: Disk, folder: str, layout: Layout, slices: Iterable[Vector]) -> None:
    """Write the vector from its slices, `float32`, which may be views of one buffer."""
    head = header(TensorInfo(entry.name, "float32", entry.shape) for entry in layout.entries)
    _write(disk, f"{folder}/{VECTOR_FILE}", chain([head], (values.data for values in slices)))


def write_states(disk: Disk, folder: str, number: int, parts: Iterable[bytes | memoryview]) -> None:
    """Write one file of shard states (`training.exchange.store.shard_states.encode`)."""
    _write(disk, f"{folder}/states-{number:06d}.bin", parts)


def _write(disk: Disk, name: str, parts: Iterable[bytes | memoryview]) -> None:
    file = disk.create(name)
    try:
        for part in parts:
            file.write(part)
        file.commit()
    except BaseException:
        file.discard()
        raise


def finish(disk: Disk, folder: str, state: CheckpointState, keep: int = KEPT) -> None:
    """Write the marker, and then remove all but the `keep` checkpoints written last."""
    disk.write(f"{folder}/{MARKER}", msgspec.json.format(msgspec.json.encode(state)))
    names = disk.names(FOLDER)
    readable = [found for name in _complete(names) if (found := _read(disk, name, None)) is not None]
    kept = tuple(f"{found.folder}/" for found in readable[:keep])
    # With the files of further trainers of the node (`training.devices.opening.device_file`).
    lent = tuple(found.state.trainer_state for found in readable[:keep] if found.state.trainer_state)
    # Files of older checkpoints and of failed attempts. The markers go first: a half-removed checkpoint must not look
    # complete.
    old = [name for name in names if not name.startswith(kept) and not name.startswith(lent)]
    for name in sorted(old, key=lambda name: not name.endswith(f"/{MARKER}")):
        disk.remove(name)


# -- reading -------------------------------------------------------------------------------------------------------


def complete(disk: Disk, log: Log) -> Iterator[Checkpoint]:
    """The checkpoints whose state can be read, the one written last first; damaged ones are logged and skipped."""
    for folder in complete_folders(disk):
        if (found := _read(disk, folder, log)) is not None:
            yield found


def complete_folders(disk: Disk) -> list[str]:
    """The folders with a marker, the one written last first."""
    return _complete(disk.names(FOLDER))


def step_of(folder: str) -> int:
    """The step in the name of a checkpoint's folder."""
    return _order(folder)[1]


def newest(disk: Disk, log: Log) -> Checkpoint | None:
    """The complete checkpoint written last."""
    return next(complete(disk, log), None)


def trainer_state(disk: Disk, checkpoint: Checkpoint) -> str:
    """The file with the trainer's own state that belongs to a checkpoint; empty if there is none."""
    # The file beside it may have come after the marker.
    for name in (f"{checkpoint.folder}/{TRAINER_FILE}", checkpoint.state.trainer_state):
        if name and disk.size(name) is not None:
            return name
    return ""


def read_vector(disk: Disk, folder: str, layout: Layout, into: Vector) -> None:
    """Load the checkpoint's vector in pieces. Raises `ValueError` when it is missing, damaged or of another layout, and
    then has changed nothing; an error while the values are read leaves a part of them in `into`."""
    name = f"{folder}/{VECTOR_FILE}"
    if (size_bytes := disk.size(name)) is None:
        raise ValueError(f"{VECTOR_FILE} is missing")
    try:
        file = TensorFile(partial(disk.read_at, name), size_bytes)
        for entry in layout.entries:
            info = file.infos.get(entry.name)
            if info is None or info.dtype != "float32" or info.size_bytes != into.itemsize * entry.size:
                raise ValueError(f"tensor {entry.name} is missing or of another size")
        for entry in layout.entries:
            start = entry.offset
            for values in file.values(entry.name):
                into[start : start + values.size] = values
                start += values.size
    except BadModelFile as error:
        raise ValueError(f"{VECTOR_FILE} is damaged: {error}") from error


def read_states(
    disk: Disk,
    checkpoint: Checkpoint,
    bounds: list[tuple[int, int]],
    parameter_total: int,
    log: Log,
) -> dict[int, StoredState]:
    """The shard states of a checkpoint; damaged files are logged and skipped. See `shard_states.decode`."""
    found: dict[int, StoredState] = {}
    genesis = bytes.fromhex(checkpoint.state.genesis)
    for name in disk.names(checkpoint.folder):
        if not (name.startswith(f"{checkpoint.folder}/states-") and name.endswith(".bin")):
            continue
        try:
            states = decode(disk.read(name) or b"", genesis, bounds, parameter_total)
            for shard, stored in states.items():
                if stored.state.is_in_range():
                    found[shard] = stored
                else:
                    log.warning("stored_state_out_of_range", shard=shard)
        except (BadStates, OSError) as error:
            log.warning("stored_states_unreadable", file=name, reason=str(error))
    return found


def _read(disk: Disk, folder: str, log: Log | None) -> Checkpoint | None:
    try:
        raw = disk.read(f"{folder}/{MARKER}")
        return Checkpoint(folder, msgspec.json.decode(raw or b"", type=CheckpointState))
    except (msgspec.DecodeError, OSError) as error:
        if log is not None:
            log.warning("checkpoint_unreadable", folder=folder, reason=str(error))
        return None


def _folders(names: Iterable[str]) -> list[str]:
    """The folders of checkpoints, complete or not."""
    found = dict.fromkeys(name.rpartition("/")[0] for name in names)
    return [folder for folder in found if _NAME.fullmatch(folder.removeprefix(f"{FOLDER}/"))]


def _order(folder: str) -> tuple[int, int]:
    """(number, step) of a folder: orders folders by when they were written."""
    match = _NAME.fullmatch(folder.removeprefix(f"{FOLDER}/"))
    assert match is not None
    return int(match[1]), int(match[2])


def _complete(names: Iterable[str]) -> list[str]:
    """Folders of checkpoints with their marker, the one written last first."""
    marked = [name for name in names if name.endswith(f"/{MARKER}")]
    return sorted(_folders(marked), key=_order, reverse=True)
