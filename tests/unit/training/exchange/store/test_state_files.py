"""Shard states on disk: bit for bit there and back, and a damaged file skipped as a whole."""

from __future__ import annotations

import numpy as np
import pytest

from p2pnode.training import checkpoint
from p2pnode.training.checkpoint import Checkpoint, CheckpointState
from p2pnode.training.exchange.store.shard_states import BadStates, batches, decode, encode
from p2pnode.training.exchange.terms import Term
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.shards.state import ShardState
from p2pnode.training.shards.value_batch import KeyResult, KeyUpdate, ValueBatch
from p2pnode.training.shards.value_table import ValueTable
from tests.harness.environment.simulated import MemoryDisk
from tests.unit.training.test_checkpoint import Lines

GENESIS = b"g" * 16
NODE, OTHER = b"n" * 20, b"o" * 20
BOUNDS = [(0, 5), (5, 9)]
#: The last two values are buffers: shard 1 has two parameters.
PARAMETERS = 7
RULE = Rule(outer_lr=0.7, outer_momentum=0.5)


def state(size: int, parameters: int, steps: int, held: int = 0) -> ShardState:
    made = ShardState(value=np.arange(size, dtype=np.float32), parameters=parameters)
    for step in range(1, steps + 1):
        made.apply(DeltaId(NODE, 2, step), 0.4, np.full(size, step / 3, np.float32), RULE)
    for step in range(steps + 1, steps + held + 1):
        made.add_pending(DeltaId(OTHER, 1, step), 0.4, np.full(size, step / 7, np.float32))
    return made


def both() -> list[tuple[int, Term, ShardState]]:
    return [(0, Term(4, NODE), state(5, 5, 3, held=2)), (1, Term(7, OTHER), state(4, 2, 1))]


def encoded(*, clean: bool) -> bytes:
    return b"".join(encode(GENESIS, both(), clean=clean))


def test_states_come_back_bit_by_bit() -> None:
    """Value, momentum, pending deltas, identities, version and term."""
    found = decode(encoded(clean=True), GENESIS, BOUNDS, PARAMETERS)

    for shard, term, before in both():
        stored = found[shard]
        assert (stored.term, stored.clean) == (term, True)
        after = stored.state
        for name in ("value", "momentum"):
            np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
        assert (after.version, after.sum_weight, after.parameters) == (
            before.version,
            before.sum_weight,
            before.parameters,
        )
        assert after.applied.rows() == before.applied.rows()
        assert sorted(after.pending) == sorted(before.pending)
        after.fold(9, RULE)
        before.fold(9, RULE)
        np.testing.assert_array_equal(after.value, before.value)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda raw: raw[:-4], "damaged"),
        (lambda raw: raw[: len(raw) // 2], "damaged"),
        (lambda raw: raw[:50] + bytes([raw[50] ^ 1]) + raw[51:], "damaged"),
        (lambda raw: b"", "damaged"),
    ],
)
def test_a_damaged_file_is_refused(change, why: str) -> None:  # type: ignore[no-untyped-def]
    """Cut, changed or empty: nothing of it is used."""
    with pytest.raises(BadStates, match=why):
        decode(change(encoded(clean=False)), GENESIS, BOUNDS, PARAMETERS)


def test_another_swarms_and_another_layouts_states_are_refused() -> None:
    """Another genesis, longer shards, fewer shards."""
    raw = encoded(clean=False)

    with pytest.raises(BadStates, match="swarm"):
        decode(raw, b"h" * 16, BOUNDS, PARAMETERS)
    for bounds in ([(0, 6), (6, 10)], [(0, 5)], [(0, 4), (4, 8)]):
        with pytest.raises(BadStates, match="layout"):
            decode(raw, GENESIS, bounds, PARAMETERS)


def test_a_damaged_file_costs_its_own_shards_only() -> None:
    """The states of the other files of a checkpoint are offered, and the damaged one is reported."""
    disk, log = MemoryDisk(), Lines()
    found = CheckpointState(
        run="r", genesis=GENESIS.hex(), layout_digest="", step=5, samples=0, optimizer_steps=0, marks=[]
    )
    folder = checkpoint.new_folder(disk, 5)
    for number, one in enumerate(both()):
        checkpoint.write_states(disk, folder, number, encode(GENESIS, [one], clean=False))
    disk.tear(f"{folder}/states-000000.bin")

    states = checkpoint.read_states(disk, Checkpoint(folder, found), BOUNDS, PARAMETERS, log)

    assert list(states) == [1]
    assert [(event, fields["file"]) for event, fields in log.lines] == [
        ("stored_states_unreadable", f"{folder}/states-000000.bin")
    ]


def test_small_states_share_a_file_and_large_ones_do_not() -> None:
    """A file has at most 16 MiB, unless a single state is larger."""
    mib = 1 << 20

    assert batches([(0, 10 * mib), (1, 6 * mib), (2, 1), (3, 50 * mib), (4, 5)]) == [[0, 1], [2], [3], [4]]


NO_MODEL = [(0, 0), (0, 0)]


def with_values(count: int) -> ShardState:
    made = ShardState(value=np.zeros(0, np.float32), parameters=0, table=ValueTable())
    for number in range(1, count + 1):
        key = b"sk%d" % number
        update = KeyUpdate(OTHER, 1, number, key, "replace", b"v" * 50_001, number)
        made.apply_batch(DeltaId(NODE, 1, number), ValueBatch(number, [update], [KeyResult(key, number)]))
    return made


def test_tables_of_values_come_back_whole() -> None:
    """Values, known updates, identities, version and term, of full and of empty tables."""
    held = [(0, Term(4, NODE), with_values(12)), (1, Term(5, NODE), with_values(0))]
    raw = b"".join(encode(GENESIS, held, clean=True))
    found = decode(raw, GENESIS, NO_MODEL, 0)
    for shard, kept, state in held:
        assert found[shard].term == kept
        assert found[shard].clean
        assert found[shard].state.table == state.table
        assert found[shard].state.applied.rows() == state.applied.rows()
    with pytest.raises(BadStates, match="another layout"):
        decode(raw, GENESIS, NO_MODEL[:1], 0)
