"""What a checkpoint offers to a run whose shards were divided since it was written."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.harness.environment.simulated import ListLog, MemoryDisk, Record, VirtualClock
from tests.harness.environment.virtual_loop import run
from tests.harness.trainers.stub_trainer import plain_layout
from training import checkpoint, stored_shards
from training.checkpoint import Checkpoint, CheckpointState
from training.exchange.store import state_files
from training.exchange.terms import Term
from training.layout import shard_bounds
from training.manifest import PROTOCOL, Manifest
from training.shard_count import Partition
from training.shards.applied import DeltaId
from training.shards.outer_rule import Rule
from training.shards.state import ShardState
from training.stored_shards import StoredShards

SIZE = 26
GENESIS = b"genesis of a run"
NODE = b"n" * 20
VECTOR = np.arange(SIZE, dtype=np.float32)


def manifest_of(shards: int, parts: int = 1, size: int = SIZE) -> Manifest:
    return Manifest(
        protocol=PROTOCOL,
        run="r",
        genesis=GENESIS.hex(),
        task="stub",
        task_version="1",
        layout=plain_layout(size),
        frozen_digest="",
        shards=shards,
        shard_parts=parts,
        rule=Rule(1.0, 0.5, ""),
        weight="sum",
        replicas=1,
        local_steps=1,
        barrier_family="relaxed",
        max_steps=0,
        until="",
    )


def written(disk: MemoryDisk, cut: Partition) -> Checkpoint:
    """A checkpoint of a run that is cut so: shard i has version i of term i + 1, and its state has delta i beside."""
    layout, bounds = plain_layout(SIZE), shard_bounds(SIZE, *cut)
    folder = checkpoint.new_folder(disk, 3)
    checkpoint.write_vector(disk, folder, layout, [VECTOR])
    states = []
    for shard, (start, stop) in enumerate(bounds):
        state = ShardState(value=VECTOR[start:stop].copy(), parameters=stop - start)
        state.apply(DeltaId(NODE, 1, shard), 0.5, np.ones(stop - start, np.float32), Rule(1.0, 0.5))
        states.append((shard, Term(shard + 1, NODE), state))
    checkpoint.write_states(disk, folder, 0, state_files.encode(GENESIS, states, clean=True))
    marks = [(shard + 1, NODE.hex(), shard) for shard in range(len(bounds))]
    state = CheckpointState(
        run="r",
        genesis=GENESIS.hex(),
        layout_digest=layout.digest(),
        step=3,
        samples=0,
        optimizer_steps=0,
        marks=marks,
        shard_parts=cut.parts,
    )
    checkpoint.finish(disk, folder, state, 2)
    return Checkpoint(folder, state)


def read(cut: Partition, manifest: Manifest) -> tuple[StoredShards | None, list[Record]]:
    records: list[Record] = []

    async def story() -> StoredShards | None:
        disk = MemoryDisk()
        return stored_shards.read(disk, written(disk, cut), manifest, ListLog(records, "", VirtualClock()))

    return run(story(), limit_s=1), records


@pytest.mark.parametrize(
    ("cut", "now"),
    [
        (Partition(4), Partition(4)),
        (Partition(4), Partition(8, 2)),
        (Partition(4), Partition(12, 3)),
        (Partition(8, 2), Partition(8, 2)),
        (Partition(8, 2), Partition(24, 6)),
    ],
)
def test_each_part_is_offered_as_the_whole_was(cut: Partition, now: Partition) -> None:
    """Term, version and identities are those of the shard that it is of; its values are its slice."""
    found, records = read(cut, manifest_of(*now))
    assert found is not None
    factor, bounds = now.shards // cut.shards, shard_bounds(SIZE, *now)

    assert len(found.versions) == len(found.states) == now.shards
    for part, (start, stop) in enumerate(bounds):
        shard = part // factor
        assert found.versions[part] == (Term(shard + 1, NODE), shard)
        one = found.states[part]
        assert (one.term, one.clean, one.state.version) == (Term(shard + 1, NODE), True, 1)
        assert one.state.applied.rows() == [(NODE, 1, [(shard, shard)])]
        np.testing.assert_array_equal(one.state.value, VECTOR[start:stop] + np.float32(0.5))
        assert one.state.momentum is not None
        assert one.state.momentum.size == stop - start
    told = [(one.fields["stored"], one.fields["shards"]) for one in records if one.event == "shards_divided"]
    assert told == ([] if factor == 1 else [(cut.shards, now.shards)])


@pytest.mark.parametrize(
    ("cut", "now"),
    [
        (Partition(4), Partition(6)),
        (Partition(4), Partition(2)),
        (Partition(4), Partition(8)),  # as many shards, and never divided: other slices
        (Partition(8, 2), Partition(4)),
        (Partition(12, 3), Partition(12, 2)),
    ],
)
def test_a_checkpoint_that_was_cut_otherwise_offers_nothing(cut: Partition, now: Partition) -> None:
    """Its shards are no slices of the run's, and what is in a slice of them nobody knows."""
    found, records = read(cut, manifest_of(*now))

    assert found is None
    (told,) = records
    assert (told.event, told.fields["stored"], told.fields["shards"]) == (
        "checkpoint_cut_otherwise",
        cut.shards,
        now.shards,
    )


def test_a_vector_shorter_than_its_shards_has_one_shard_per_value() -> None:
    """The manifest has the number that was chosen, the checkpoint as many as there are."""
    found, _ = read(Partition(SIZE), manifest_of(64))

    assert found is not None
    assert len(found.versions) == SIZE


@pytest.mark.parametrize("changes", [{"marks": []}, {"shard_parts": 0}, {"shard_parts": -2}, {"shard_parts": 3}])
def test_what_a_damaged_marker_says_is_not_believed(changes: dict[str, Any]) -> None:
    """It offers nothing, and ends no start."""

    async def story() -> StoredShards | None:
        disk = MemoryDisk()
        made = written(disk, Partition(4))
        damaged = made._replace(state=msgspec.structs.replace(made.state, **changes))
        return stored_shards.read(disk, damaged, manifest_of(8, 2), ListLog([], "", VirtualClock()))

    assert run(story(), limit_s=1) is None
