"""The memory budget of the exchange, and that it equals the memory in use."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from training.budget import budget
from training.settings import ExchangeSettings
from training.shards.applied import DeltaId
from training.shards.outer_rule import Rule
from training.shards.state import ShardState

VALUES = 25_000_000
DEFAULT = ExchangeSettings()


def test_a_node_alone_needs_replica_delta_and_three_arrays_per_shard() -> None:
    """25 M values alone: 100 MB each for replica and delta, 300 MB owned, no backup, residual or log."""
    found = budget(VALUES, DEFAULT, 1)

    assert found.parts() == {
        "replica_bytes": 100_000_000,
        "delta_bytes": 100_000_000,
        "residual_bytes": 0,
        "owned_bytes": 300_000_000,
        "backed_bytes": 0,
        "outbox_bytes": 0,
        "repair_log_bytes": 0,
        "windows_bytes": 0,
    }
    assert (found.total, found.shared) == (500_000_000, 200_000_000)


def test_owned_and_backed_shrink_with_the_swarm() -> None:
    """Of ten nodes each owns a tenth and backs up a tenth; the rest does not depend on their number."""
    ten, twenty = budget(VALUES, DEFAULT, 10), budget(VALUES, DEFAULT, 20)

    assert (ten.owned, ten.backed) == (30_000_000, 30_000_000)
    assert (twenty.owned, twenty.backed) == (15_000_000, 15_000_000)
    assert ten.residual == twenty.residual == 100_000_000


@pytest.mark.parametrize(
    ("changes", "part", "expected"),
    [
        ({"replicas": 0}, "backed", 0),
        ({"outer_momentum": 0.0}, "owned", 10_000_000),
        ({"codec": "float32"}, "residual", 0),
        ({"outbox_bytes": 1 << 20}, "outbox", 50_000_000),  # one delta in bfloat16 is kept in any case
        ({"outbox_bytes": 1 << 28}, "outbox", 1 << 28),
        ({"log_bytes": 1 << 20}, "repair_log", 1 << 20),
        ({"log_seconds": 0.0}, "repair_log", 0),
        ({"enabled": False}, "owned", 0),
        # A delta of each of ten members, for the tenth that is owned and the tenth that is backed up.
        ({"robust": "trimmed-mean"}, "windows", 200_000_000),
        ({"robust": "trimmed-mean", "replicas": 0}, "windows", 100_000_000),
        ({"robust": "clip"}, "windows", 0),
    ],
)
def test_settings_change_their_parts(changes: dict[str, object], part: str, expected: int) -> None:
    """Each setting that needs memory changes its part."""
    found = budget(VALUES, msgspec.structs.replace(DEFAULT, **changes), 10)

    assert getattr(found, part) == expected


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_shard_needs_the_memory_of_the_budget(momentum: float) -> None:
    """The arrays of a shard that has received deltas are the owned part of one node."""
    state = ShardState(value=np.zeros(1000, np.float32), parameters=1000)
    for step in range(3):
        state.apply(DeltaId(b"n" * 20, 1, step), 0.5, np.ones(1000, np.float32), Rule(0.7, momentum))

    settings = msgspec.structs.replace(DEFAULT, outer_momentum=momentum)
    assert state.size_bytes == budget(1000, settings, 1).owned
