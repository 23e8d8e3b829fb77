"""The memory budget of the exchange, and that it equals the memory in use."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from p2pnode import malloc
from training.budget import CACHE_BYTES, FILE_BYTES, KEPT_BYTES, PART_VALUES, PROCESS_BYTES, budget
from training.exchange import cooperative
from training.exchange.owner import encoding_cache
from training.exchange.store import state_files
from training.settings import ExchangeSettings
from training.shards.applied import DeltaId
from training.shards.outer_rule import Rule
from training.shards.state import ShardState

VALUES = 25_000_000
DEFAULT = ExchangeSettings()


def test_a_node_alone_needs_replica_delta_and_two_arrays_per_shard() -> None:
    """25 M values alone: 100 MB each for replica and delta, 200 MB owned, for a checkpoint copies of one shard of the
    vector and of 16 MiB of shards; no backup, residual, log or buffers."""
    found = budget(VALUES, DEFAULT, 1)

    assert {name: size for name, size in found.parts().items() if size} == {
        "replica_bytes": 100_000_000,
        "delta_bytes": 100_000_000,
        "owned_bytes": 200_000_000,
        "checkpoint_bytes": 100_000_000 // 64 + (16 << 20),
        "process_bytes": PROCESS_BYTES,
    }
    assert found.total == sum(found.parts().values())
    assert found.shared == 200_000_000
    assert found.to_come == 200_000_000 + 100_000_000 // 64 + (16 << 20)


def test_owned_and_backed_shrink_with_the_swarm() -> None:
    """Of ten nodes each owns a tenth and backs up a tenth; the rest does not depend on their number."""
    ten, twenty = budget(VALUES, DEFAULT, 10), budget(VALUES, DEFAULT, 20)

    assert (ten.owned, ten.backed) == (20_000_000, 20_000_000)
    assert (twenty.owned, twenty.backed) == (10_000_000, 10_000_000)
    assert ten.residual == twenty.residual == 100_000_000


def test_steps_that_overlap_need_a_base_of_their_own() -> None:
    """A copy of the vector in the trainer, which is not there when the free memory is checked. Steps that carry a part
    of a delta need it too, which a node alone does not."""
    none = ExchangeSettings(carry=0.0, overlap=False)
    plain, overlapping = budget(VALUES, none, 4), budget(VALUES, ExchangeSettings(carry=0.0), 4)

    assert (plain.base, overlapping.base) == (0, 100_000_000)
    assert budget(VALUES, DEFAULT, 1).base == 0
    correcting = msgspec.structs.replace(DEFAULT, correct=0.5)
    assert [budget(VALUES, correcting, nodes).base for nodes in (1, 2)] == [0, 200_000_000]
    assert budget(VALUES, ExchangeSettings(overlap=True), 1).base == 100_000_000
    assert overlapping.to_come - plain.to_come == 100_000_000
    assert [budget(VALUES, DEFAULT, nodes).base for nodes in (1, 2, 4)] == [0, 100_000_000, 100_000_000]
    assert budget(VALUES, ExchangeSettings(codec="sparse", overlap=False), 4).base == 100_000_000


def test_sparse_deltas_need_no_momentum_and_little_to_send() -> None:
    """Of four nodes each owns a quarter of the values alone; a delta in the outbox takes 0.056 bytes per value."""
    found = budget(VALUES, msgspec.structs.replace(DEFAULT, codec="sparse"), 4)

    assert found.owned == found.backed == 25_000_000
    assert 0.056 * VALUES < found.outbox < 0.0562 * VALUES
    assert found.residual == 100_000_000


def test_a_small_model_needs_little_of_everything() -> None:
    """No limit is counted whole where the model cannot fill it: 100,000 values take 100 MB, most of it the program."""
    found = budget(100_000, DEFAULT, 4)

    assert found.to_come < 30_000_000


def test_the_sizes_of_other_modules_are_theirs() -> None:
    """The budget may not import them."""
    assert (KEPT_BYTES, CACHE_BYTES) == (malloc.KEPT_BYTES, encoding_cache.MAX_BYTES)
    assert (PART_VALUES, FILE_BYTES) == (cooperative.VALUES_PER_PART, state_files.FILE_BYTES)


@pytest.mark.parametrize(
    ("changes", "part", "expected"),
    [
        ({"replicas": 0}, "backed", 0),
        ({"outer_momentum": 0.0}, "owned", 10_000_000),
        ({"codec": "float32"}, "residual", 0),
        ({"on_disk": ["residual"]}, "residual", 0),
        ({"on_disk": ["residual"]}, "owned", 20_000_000),
        ({"on_disk": ["log"]}, "repair_log", 0),
        ({"on_disk": ["shards"]}, "owned", 0),
        ({"on_disk": ["shards"]}, "backed", 0),
        ({"on_disk": ["shards"]}, "residual", 100_000_000),
        ({}, "outbox", 50_000_000),  # one delta in bfloat16
        ({"codec": "float32"}, "outbox", 100_000_000),
        ({"log_seconds": 1.0}, "repair_log", 100_000_000),  # a step a second, logged at owner and backup
        ({"log_seconds": 1.0, "replicas": 0}, "repair_log", 50_000_000),
        ({"log_bytes": 1 << 20}, "repair_log", 1 << 20),
        ({"log_seconds": 0.0}, "repair_log", 0),
        ({"enabled": False}, "owned", 0),
        # A delta of each of ten members, for the tenth that is owned and the tenth that is backed up.
        ({"robust": "trimmed-mean"}, "windows", 200_000_000),
        ({"robust": "trimmed-mean", "replicas": 0}, "windows", 100_000_000),
        ({"robust": "clip"}, "windows", 0),
        ({}, "published", 20_000_000),  # by default the line decides
        ({"codec": "bfloat16"}, "published", 0),
        ({"codec": "float32"}, "published", 0),
        # The tenth that is owned, as its followers hold it, and as much again of changes at most.
        ({"codec": "int8"}, "published", 20_000_000),
        ({"pull_codec": "int8"}, "published", 20_000_000),
        ({"codec": "int8", "pull_codec": "bfloat16"}, "published", 0),
        # Of the eighth of the shards whose owners begin with the digit of this node, where there are more nodes.
        ({"pull_codec": "int8", "relay_above": 9}, "handed_down", 12_500_000),
        ({"pull_codec": "int8", "relay_above": 9, "relay_bits": 1}, "handed_down", 50_000_000),
        ({"pull_codec": "int8", "relay_above": 10}, "handed_down", 0),
        ({"pull_codec": "bfloat16", "relay_above": 9}, "handed_down", 0),
        ({"pull_codec": "int8"}, "handed_down", 0),
    ],
)
def test_settings_change_their_parts(changes: dict[str, object], part: str, expected: int) -> None:
    """Each setting that needs memory changes its part."""
    found = budget(VALUES, msgspec.structs.replace(DEFAULT, **changes), 10)

    assert getattr(found, part) == expected


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_shard_needs_the_memory_of_the_budget(momentum: float) -> None:
    """The arrays of the shards of two nodes that have received deltas are the owned part of both, and those of a node
    alone its own."""
    state = ShardState(value=np.zeros(1000, np.float32), parameters=1000)
    for step in range(3):
        state.apply(DeltaId(b"n" * 20, 1, step), 0.5, np.ones(1000, np.float32), Rule(0.7, momentum))

    settings = msgspec.structs.replace(DEFAULT, outer_momentum=momentum)
    assert state.size_bytes == 2 * budget(1000, settings, 2).owned
    alone = ShardState(value=np.zeros(1000, np.float32), parameters=1000)
    for step in range(3):
        alone.apply(DeltaId(b"n" * 20, 1, step), 1.0, np.ones(1000, np.float32), Rule(0.7, momentum))
    assert alone.size_bytes == budget(1000, settings, 1).owned


@pytest.mark.parametrize("values", [VALUES, 124_000_000])
def test_the_budget_of_no_number_of_shards_is_that_of_the_models(values: int) -> None:
    """Of a larger model a checkpoint copies one shard of 1.9 MB, not a 64th of the vector."""
    shards = {VALUES: 64, 124_000_000: 256}[values]
    found = budget(values, DEFAULT, 1)

    assert found == budget(values, ExchangeSettings(shards=shards), 1)
    assert found.checkpoint == 4 * values // shards + FILE_BYTES


def test_a_delta_on_disk_is_no_memory() -> None:
    """Nor is it shared; with and without an exchange."""
    alone = msgspec.structs.replace(DEFAULT, enabled=False)
    for settings in (DEFAULT, alone):
        in_memory, on_disk = budget(VALUES, settings, 2), budget(VALUES, settings, 2, delta_on_disk=True)
        assert (in_memory.delta, on_disk.delta) == (100_000_000, 0)
        assert in_memory.shared - on_disk.shared == in_memory.total - on_disk.total == 100_000_000


def test_without_checkpoints_there_is_no_copy_for_them() -> None:
    """Nor without an exchange, where a checkpoint still copies the vector."""
    assert budget(VALUES, DEFAULT, 4, checkpoints=False).checkpoint == 0
    alone = msgspec.structs.replace(DEFAULT, enabled=False)
    assert (budget(VALUES, alone, 1).checkpoint, budget(VALUES, alone, 1, checkpoints=False).checkpoint) == (10**8, 0)
