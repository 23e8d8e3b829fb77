"""Which checkpoint a shard goes back to that is broken in memory: the newest with good values of that shard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from p2pnode.lifecycle.checkpoint_copies import CheckpointCopies
from tests.harness.environment.simulated import InlineExecutor, ListLog, MemoryDisk, VirtualClock
from tests.harness.environment.virtual_loop import run
from tests.harness.trainers.stub_trainer import plain_layout
from training import checkpoint
from training.checkpoint import CheckpointState
from training.exchange.store import state_files
from training.exchange.store.good_copies import StoredCopy
from training.exchange.terms import Term
from training.manifest import PROTOCOL, Manifest
from training.shards.outer_rule import Rule
from training.shards.state import ShardState

GENESIS = "ab" * 16
SIZE, SHARDS, WIDTH = 16, 4, 4
LAYOUT = plain_layout(SIZE)
TERM = Term(3, b"n" * 20)
ME = b"m" * 20


def write(
    disk: MemoryDisk, step: int, *, shard_1: float | None = None, state_1: float | None = None, **other: Any
) -> str:
    """A checkpoint whose values are its step. `shard_1`: the value of shard 1 in the vector; `state_1`: that of the
    state of shard 1, which only some have."""
    folder = checkpoint.new_folder(disk, step)
    vector = np.full(SIZE, float(step), np.float32)
    vector[WIDTH : 2 * WIDTH] = step if shard_1 is None else shard_1
    checkpoint.write_vector(disk, folder, LAYOUT, [vector])
    if state_1 is not None:
        state = ShardState(np.full(WIDTH, state_1, np.float32), WIDTH, version=step)
        parts = state_files.encode(bytes.fromhex(GENESIS), [(1, TERM, state)], clean=False)
        checkpoint.write_states(disk, folder, 0, parts)
    marks = [(TERM.number, TERM.node.hex(), step)] * SHARDS
    fields = {"run": "r", "genesis": GENESIS, "layout_digest": LAYOUT.digest(), "samples": 0, "optimizer_steps": 0}
    checkpoint.finish(disk, folder, CheckpointState(**(fields | {"step": step, "marks": marks} | other)), 9)
    return folder


def newest_good(disk: MemoryDisk, shard: int = 1, *, parts: int = 1) -> StoredCopy | None:
    """`parts`: of each shard that the checkpoints have."""
    manifest = Manifest(
        protocol=PROTOCOL,
        run="r",
        genesis=GENESIS,
        task="stub",
        task_version="1",
        layout=LAYOUT,
        frozen_digest="",
        shards=SHARDS * parts,
        shard_parts=parts,
        rule=Rule(1.0, 0.0, ""),
        weight="sum",
        replicas=1,
        local_steps=1,
        barrier_family="relaxed",
        max_steps=0,
        until="",
    )
    found = []

    async def scenario() -> None:
        log = ListLog([], "", VirtualClock())
        environment: Any = SimpleNamespace(disk=disk, executor=InlineExecutor(), log=log)
        found.append(await CheckpointCopies(environment, manifest).newest_good(shard))

    run(scenario())
    return found[0]


def test_the_newest_is_taken_and_its_state_before_its_vector() -> None:
    """The state has the history of the shard; of a shard without one the vector's part counts, with its deltas."""
    disk = MemoryDisk()
    write(disk, 3)
    folder = write(disk, 5, state_1=50.0)

    owned, pulled = newest_good(disk), newest_good(disk, 2)

    assert owned is not None
    assert (owned.folder, owned.term, owned.version, owned.value.tolist()) == (folder, TERM, 5, [50.0] * WIDTH)
    assert owned.state is not None
    assert pulled is not None
    assert (pulled.folder, pulled.version, pulled.value.tolist()) == (folder, 5, [5.0] * WIDTH)
    assert pulled.state is None


def test_a_checkpoint_from_before_a_division_has_the_part() -> None:
    """Of the state where there is one, otherwise of the vector, with term, version and deltas of the whole. One that
    was cut otherwise is passed over."""
    disk = MemoryDisk()
    folder = write(disk, 5, shard_1=6.0, state_1=50.0)
    write(disk, 7, marks=[(TERM.number, TERM.node.hex(), 7)] * 3)

    owned, pulled = newest_good(disk, 3, parts=2), newest_good(disk, 4, parts=2)

    assert owned is not None
    assert owned.state is not None
    assert (owned.folder, owned.term, owned.version, owned.value.tolist()) == (folder, TERM, 5, [50.0] * (WIDTH // 2))
    assert pulled is not None
    assert (pulled.folder, pulled.term, pulled.version, pulled.value.tolist()) == (
        folder,
        TERM,
        5,
        [5.0] * (WIDTH // 2),
    )
    (first, second) = (newest_good(disk, shard, parts=4) for shard in (4, 7))
    assert first is not None
    assert second is not None
    assert first.value.tolist() == second.value.tolist() == [50.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_checkpoint_with_broken_values_is_passed_over(bad: float) -> None:
    """Only for the shard that is broken in it; a broken state gives way to the vector of the same checkpoint."""
    disk = MemoryDisk()
    write(disk, 3)
    write(disk, 5, shard_1=bad)
    newest = write(disk, 7, shard_1=7.0, state_1=bad)
    write(disk, 9, shard_1=bad, state_1=bad)
    assert (newest_good(disk) or pytest.fail("none")).folder == newest
    for name in disk.names(newest):
        disk.remove(name)
    assert (newest_good(disk) or pytest.fail("none")).value.tolist() == [3.0] * WIDTH
    assert (newest_good(disk, 2) or pytest.fail("none")).value.tolist() == [9.0] * WIDTH


def test_a_checkpoint_of_another_swarm_or_model_gives_nothing() -> None:
    """Nor does one that cannot be read, nor an empty disk."""
    disk = MemoryDisk()
    assert newest_good(disk) is None
    write(disk, 3, genesis="cd" * 16)
    write(disk, 4, layout_digest="another")
    write(disk, 5, marks=[(1, "no hexadecimal", 1)] * SHARDS)
    folder = write(disk, 6)
    disk.write(f"{folder}/{checkpoint.VECTOR_FILE}", b"torn")
    assert newest_good(disk) is None
    write(disk, 2)
    assert (newest_good(disk) or pytest.fail("none")).version == 2
