"""The memory that the exchange of a model will take, and whether it fits into free memory."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from p2pnode import own_memory
from p2pnode.errors import ExitCode, UserError
from p2pnode.lifecycle.memory_budget import (
    CACHE_BYTES,
    FILE_BYTES,
    KEPT_BYTES,
    PART_VALUES,
    PROCESS_BYTES,
    budget,
    check_memory,
)
from p2pnode.training import cooperative
from p2pnode.training.exchange.owner import reads
from p2pnode.training.exchange.store import shard_states
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.shards.state import ShardState
from tests.harness.environment.simulated import NoLog

VALUES = 25_000_000
DEFAULT = ExchangeSettings()


def test_a_node_alone_needs_replica_delta_and_two_arrays_per_shard() -> None:
    """25 M values alone: 100 MB each for replica and delta, 200 MB owned, 150 MB for those that may join with the same
    initial values, for a checkpoint copies of one shard of the vector and of 16 MiB of shards; no backup, log or
    buffers."""
    found = budget(VALUES, DEFAULT, 1)

    assert {name: size for name, size in found.parts().items() if size} == {
        "replica_bytes": 100_000_000,
        "delta_bytes": 100_000_000,
        "owned_bytes": 200_000_000,
        "published_bytes": 150_000_000,
        "checkpoint_bytes": 100_000_000 // 64 + (16 << 20),
        "base_bytes": 100_000_000,
        "process_bytes": PROCESS_BYTES,
    }
    assert found.total == sum(found.parts().values())
    assert found.shared == 200_000_000
    assert found.to_come == 450_000_000 + 100_000_000 // 64 + (16 << 20)


def test_a_small_model_needs_little_of_everything() -> None:
    """No limit is counted whole where the model cannot fill it: 100,000 values take 100 MB, most of it the program."""
    found = budget(100_000, DEFAULT, 4)

    assert found.to_come < 30_000_000


def test_the_sizes_of_other_modules_are_theirs() -> None:
    """The budget may not import them."""
    assert (KEPT_BYTES, CACHE_BYTES) == (own_memory.KEPT_BYTES, reads.MAX_ENCODED_BYTES)
    assert (PART_VALUES, FILE_BYTES) == (cooperative.VALUES_PER_PART, shard_states.FILE_BYTES)


@pytest.mark.parametrize(
    ("changes", "part", "expected"),
    [
        # Of ten nodes each owns a tenth, value and momentum, and backs up a tenth; the trainer has a base of its own.
        ({}, "owned", 20_000_000),
        ({}, "backed", 20_000_000),
        ({}, "base", 100_000_000),
        ({"codec": "sparse"}, "owned", 10_000_000),
        ({"replicas": 0}, "backed", 0),
        ({"outer_momentum": 0.0}, "owned", 10_000_000),
        ({}, "outbox", 50_000_000),  # one delta in bfloat16
        ({"codec": "float32"}, "outbox", 100_000_000),
        ({"log_seconds": 1.0}, "repair_log", 100_000_000),  # a step a second, logged at owner and backup
        ({"log_seconds": 1.0, "replicas": 0}, "repair_log", 50_000_000),
        ({"log_bytes": 1 << 20}, "repair_log", 1 << 20),
        ({"log_seconds": 0.0}, "repair_log", 0),
        # A delta of each of ten members, for the tenth that is owned and the tenth that is backed up.
        ({}, "published", 15_000_000),  # by default the line decides
        ({"codec": "bfloat16"}, "published", 0),
        ({"codec": "float32"}, "published", 0),
        # The tenth that is owned, as its followers hold it, and half as much of changes at most.
        ({"codec": "int8"}, "published", 15_000_000),
        ({"pull_codec": "int8"}, "published", 15_000_000),
        ({"codec": "int8", "pull_codec": "bfloat16"}, "published", 0),
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


def test_without_checkpoints_there_is_no_copy_for_them() -> None:
    """With `training.checkpoint_s = 0` nothing is copied."""
    assert budget(VALUES, DEFAULT, 4, checkpoints=False).checkpoint == 0


# -- the check -------------------------------------------------------------------------------------------------------

#: Of a model that is checked.
SMALL = 1_000_000
NODES = 8.0


class Warnings(NoLog):
    """Keeps the names of warnings."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def warning(self, event: str, **_fields: Any) -> None:
        self.events.append(event)


def events(available: int | None, *, trainer_bytes: int = 0, others_here: int = 0) -> list[str]:
    log = Warnings()
    check_memory(
        available,
        SMALL,
        DEFAULT,
        NODES,
        log,
        checkpoints=True,
        trainer_bytes=trainer_bytes,
        others_here=others_here,
    )
    return log.events


def needed(nodes: float) -> int:
    """All that is not allocated yet: log, outbox, buffers and checkpoint are in it."""
    share = budget(SMALL, DEFAULT, nodes)
    exchange = (share.owned, share.backed, share.published, share.outbox, share.repair_log)
    parts = (*exchange, share.buffers, share.checkpoint, share.base)
    assert min(parts) > 0
    return sum(parts)


@pytest.mark.parametrize(("trainer_bytes", "others_here"), [(0, 0), (16_000_000, 0), (0, 1), (16_000_000, 3)], ids=str)
def test_what_does_not_fit_is_refused(trainer_bytes: int, others_here: int) -> None:
    """One byte too little is an error with the trainer's exit code; exactly enough is none. The optimiser of the
    trainer is counted before it exists, and so are the other nodes on the machine that have not begun."""
    enough = (needed(NODES) + trainer_bytes) * (1 + others_here)
    events(enough, trainer_bytes=trainer_bytes, others_here=others_here)

    with pytest.raises(UserError, match="are free") as refused:
        events(enough - 1, trainer_bytes=trainer_bytes, others_here=others_here)

    assert refused.value.exit_code == ExitCode.TRAINER
    assert ("more on this machine" in str(refused.value)) == (others_here > 0)
    assert "checkpoint_s" in refused.value.hint


def test_a_share_that_fits_only_beside_others_is_a_warning() -> None:
    """With memory for its share alone or with one other there is no warning, with a byte less there is."""
    most = max(needed_alone(), needed(2))

    assert events(needed(NODES)) == ["memory_tight"]
    assert events(most - 1) == ["memory_tight"]
    assert events(most) == []


def needed_alone() -> int:
    return budget(SMALL, DEFAULT, 1).to_come


def test_unknown_memory_is_not_checked() -> None:
    """Where the system does not report free memory, the node starts."""
    assert events(None) == []
