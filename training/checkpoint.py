"""Checkpoints in safetensors and JSON: written atomically, and read from the newest complete one.

A checkpoint is the folder `checkpoints/step-N`: `vector.safetensors` (every tensor by its canonical name, float32),
`trainer.state` (written by the trainer: optimiser, schedule, random state, data position; may be missing) and
`state.json`, which is written last and so marks the others as complete. `states-N.bin` are the shards that the node
owned and backed up (`training.exchange.store.state_files`); a leaving node writes them again after its hand-over.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from overlay.environment import Disk, Log
from training.encoding.codecs import Vector
from training.exchange.store.records import StoredState
from training.exchange.store.state_files import BadStates, decode
from training.exchange.terms import Term
from training.layout import Layout

FOLDER = "checkpoints"


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """`state.json`. `marks` holds (term number, term node as hex, version) per shard."""

    schema: int = 1
    run: str
    genesis: str
    layout_digest: str
    step: Annotated[int, Meta(ge=0)]
    samples: int
    optimizer_steps: int
    marks: list[tuple[int, str, int]]

    def terms(self) -> list[tuple[Term, int]]:
        """`marks` as terms and versions."""
        return [(Term(number, bytes.fromhex(node)), version) for number, node, version in self.marks]


def folder_of(step: int) -> str:
    return f"{FOLDER}/step-{step:010d}"


def write(disk: Disk, state: CheckpointState, layout: Layout, vector: Vector, keep: int) -> None:
    """Write a checkpoint and remove all but the newest `keep`. Raises `OSError` and then leaves the earlier ones."""
    import safetensors.numpy  # here: its 0.8 MB are not needed before the first checkpoint

    folder = folder_of(state.step)
    tensors = {
        entry.name: vector[entry.offset : entry.offset + entry.size].reshape(entry.shape) for entry in layout.entries
    }
    disk.write(f"{folder}/vector.safetensors", safetensors.numpy.save(tensors))
    disk.write(f"{folder}/state.json", msgspec.json.format(msgspec.json.encode(state)))
    complete = _complete(disk)
    for old in complete[:-keep]:
        # The marker goes first: a half-removed checkpoint must not look complete.
        disk.remove(f"{old}/state.json")
    kept = [f"{name}/" for name in complete[-keep:]]
    for name in disk.names(FOLDER):
        # Files of older checkpoints and of failed attempts.
        if not name.startswith(tuple(kept)):
            disk.remove(name)


def write_states(disk: Disk, folder: str, number: int, raw: bytes) -> None:
    """Write one file of shard states. Raises `OSError`."""
    disk.write(_states_file(folder, number), raw)


def keep_states(disk: Disk, folder: str, count: int) -> None:
    """Remove all files of shard states but the first `count`."""
    for name in _state_files(disk, folder):
        if name >= _states_file(folder, count):
            disk.remove(name)


def read_states(
    disk: Disk, state: CheckpointState, bounds: list[tuple[int, int]], parameter_total: int, log: Log
) -> dict[int, StoredState]:
    """The shard states of a checkpoint; damaged files are logged and skipped."""
    found: dict[int, StoredState] = {}
    for name in _state_files(disk, folder_of(state.step)):
        try:
            raw = disk.read(name) or b""
            for shard, stored in decode(raw, bytes.fromhex(state.genesis), bounds, parameter_total).items():
                if shard not in found or stored.rank > found[shard].rank:
                    found[shard] = stored
        except (BadStates, OSError) as error:
            log.warning("stored_states_unreadable", file=name, reason=str(error))
    return found


def _states_file(folder: str, number: int) -> str:
    return f"{folder}/states-{number:06d}.bin"


def _state_files(disk: Disk, folder: str) -> list[str]:
    return [name for name in disk.names(folder) if name.startswith(f"{folder}/states-") and name.endswith(".bin")]


def newest(disk: Disk, log: Log) -> CheckpointState | None:
    """The newest checkpoint whose state can be read; damaged ones are logged and skipped."""
    for folder in reversed(_complete(disk)):
        try:
            raw = disk.read(f"{folder}/state.json")
            return msgspec.json.decode(raw or b"", type=CheckpointState)
        except (msgspec.DecodeError, OSError) as error:
            log.warning("checkpoint_unreadable", folder=folder, reason=str(error))
    return None


def read_vector(disk: Disk, state: CheckpointState, layout: Layout, into: Vector) -> None:
    """Load the checkpoint's vector. Raises `ValueError` when it does not fit the layout or is damaged."""
    import safetensors.numpy

    raw = disk.read(f"{folder_of(state.step)}/vector.safetensors")
    if raw is None:
        raise ValueError("vector.safetensors is missing")
    try:
        tensors = safetensors.numpy.load(raw)
    except safetensors.SafetensorError as error:
        raise ValueError(f"vector.safetensors is damaged: {error}") from error
    for entry in layout.entries:
        found = tensors.get(entry.name)
        if found is None or found.size != entry.size:
            raise ValueError(f"tensor {entry.name} is missing or of another size")
    for entry in layout.entries:  # after all checks: half a vector would be worse than none
        into[entry.offset : entry.offset + entry.size] = np.ravel(tensors[entry.name])


def _complete(disk: Disk) -> list[str]:
    """Folders of checkpoints with their marker, oldest first."""
    suffix = "/state.json"
    return [name[: -len(suffix)] for name in disk.names(FOLDER) if name.endswith(suffix)]
