"""States of shards in a request and on a disk: they arrive completely, bit by bit, or are refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import msgspec
import numpy as np
import pytest

from p2pnode.overlay.transport import Buffer
from p2pnode.training.encoding.frames import BadFrame, FrameReader
from p2pnode.training.exchange.messages import decode, encode, record_frames
from p2pnode.training.exchange.ownership_messages import StateHead
from p2pnode.training.exchange.store import shard_states
from p2pnode.training.exchange.store.shard_states import (
    ANY_STEPS,
    DELTAS_PER_STEP,
    BadStates,
    PlausibleSteps,
    batches,
    describe,
    implausible,
    restore,
)
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import MAX_BELIEVED, Term
from p2pnode.training.files import checkpoint
from p2pnode.training.files.checkpoint import Checkpoint, CheckpointState
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.shards.state import ShardState
from p2pnode.training.shards.value_batch import KeyResult, KeyUpdate, ValueBatch
from p2pnode.training.shards.value_table import ValueTable
from p2pnode.training.values.encoding import encode_key, encode_value
from tests.harness.builders.stores import IDS, SUM, store_of, term, zeros
from tests.harness.environment.simulated import InlineExecutor, MemoryDisk
from tests.unit.training.files.test_checkpoint import Lines


async def stream(buffers: Iterable[Buffer]) -> AsyncIterator[Buffer]:
    for buffer in buffers:
        yield buffer


def rich_state(store: ShardStore, shard: int, rule: Rule) -> ShardState:
    """A state with all parts: momentum, gaps, pending deltas of two steps, an era."""
    rng = np.random.default_rng(shard)
    state = store.fresh_state(shard, rng.normal(size=4))
    for step in (1, 2, 4):
        state.apply(DeltaId(IDS["x"], 2, step), 0.4, rng.normal(size=4).astype(np.float32), rule)
    for step, node in ((6, "b"), (5, "c"), (5, "a")):
        delta = rng.normal(size=4).astype(np.float32)
        state.add_pending(DeltaId(IDS[node], 1, step), 0.25, delta, plain=node == "c")
    state.era_step, state.folded_step = 3, 4
    state.norms.note(IDS["x"], 2, 4, 1.5)
    return state


def transferred(states: dict[int, ShardState], into: ShardStore) -> dict[int, ShardState]:
    heads = [describe(shard, term(7, "a"), state) for shard, state in states.items()]
    body = list(shard_states.body([(head, states[head.shard]) for head in heads]))

    async def receive() -> dict[int, ShardState]:
        reader = FrameReader(stream(body))
        found = {}
        for shard in states:
            read_term, found[shard] = await shard_states.read_state(reader, shard, into, ANY_STEPS, InlineExecutor())
            assert read_term == term(7, "a")
        assert await reader.header() is None
        return found

    return asyncio.run(receive())


@pytest.mark.parametrize("rule", [SUM, Rule(0.7, 0.9)], ids=["plain", "momentum"])
def test_a_state_survives_the_wire(rule: Rule) -> None:
    """For shards of parameters, of both, and of buffers; both states continue with the same bits."""
    store = store_of("a", rule)
    states = {shard: rich_state(store, shard, rule) for shard in range(4)}

    arrived = transferred(states, store_of("b", rule))

    for shard, state in states.items():
        again = arrived[shard]
        assert sorted(again.applied.rows()) == sorted(state.applied.rows())
        assert [one.plain for one in again.pending_deltas()] == [False, False, True]
        assert again.norms.rows() == state.norms.rows() == [(IDS["x"], 2, 4, 1.5)]
        assert (again.version, again.sum_weight, again.era_step, again.folded_step, again.parameters) == (
            state.version,
            state.sum_weight,
            state.era_step,
            state.folded_step,
            state.parameters,
        )
        for one in (state, again):
            one.fold(9, rule)
            one.apply(DeltaId(IDS["d"], 1, 1), 0.9, np.ones(4, dtype=np.float32), rule)
        assert again.value.tobytes() == state.value.tobytes()
        assert (again.momentum is None) == (state.momentum is None)


def test_a_state_of_a_shard_that_does_not_exist_is_refused() -> None:
    """The head is checked against the layout before anything is allocated."""
    store = store_of("a")

    with pytest.raises(BadFrame, match="shard 4 of 4"):
        asyncio.run(shard_states.read_state(FrameReader(stream([])), 4, store, ANY_STEPS, InlineExecutor()))
    other = stream(record_frames(0, describe(1, term(1, "a"), zeros(store))))
    with pytest.raises(BadFrame, match="shard 1 in the place of 0"):
        asyncio.run(shard_states.read_state(FrameReader(other), 0, store, ANY_STEPS, InlineExecutor()))


def test_a_state_with_parts_missing_is_a_bad_frame() -> None:
    """Cut before any of its arrays, a state is not taken for one with fewer of them."""
    rule = Rule(0.7, 0.9)
    store = store_of("a", rule)
    state = rich_state(store, 2, rule)
    head = describe(2, term(7, "a"), state)
    buffers = list(shard_states.body([(head, state)]))

    for kept in range(0, len(buffers), 2):
        with pytest.raises(BadFrame):
            asyncio.run(
                shard_states.read_state(FrameReader(stream(buffers[:kept])), 2, store, ANY_STEPS, InlineExecutor())
            )


def test_arrays_in_another_order_are_a_bad_frame() -> None:
    """A momentum is not taken for a pending delta, though both have the same size."""
    rule = Rule(0.7, 0.9)
    store = store_of("a", rule)
    state = rich_state(store, 0, rule)
    head = describe(0, term(7, "a"), state)
    buffers = list(shard_states.body([(head, state)]))
    buffers[4:6], buffers[6:8] = buffers[6:8], buffers[4:6]

    with pytest.raises(BadFrame):
        asyncio.run(shard_states.read_state(FrameReader(stream(buffers)), 0, store, ANY_STEPS, InlineExecutor()))


@pytest.mark.parametrize(
    "change",
    [{"shard": 4096}, {"shard": -1}, {"term": (-1, b"")}, {"version": -1}, {"applied": [(b"x", 1)]}, {"pending": [1]}],
    ids=str,
)
def test_a_malformed_head_is_refused_when_it_is_decoded(change: dict[str, object]) -> None:
    """Values out of range fail in the decoder, not in the store."""
    store = store_of("a")
    head = msgspec.structs.replace(describe(0, term(1, "a"), zeros(store)), **change)

    with pytest.raises(msgspec.DecodeError):
        decode(encode(head), StateHead)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("part", ["value", "momentum", "pending"])
def test_a_state_with_values_out_of_range_is_refused(part: str, bad: float) -> None:
    """Whoever sends it: a catch-up, a hand-over or a take-over continues from values that train, or not at all."""
    rule = Rule(outer_lr=1.0, outer_momentum=0.9)
    store = store_of("a", rule)
    state = rich_state(store, 0, rule)
    assert state.momentum is not None
    arrays = {"value": state.value, "momentum": state.momentum, "pending": state.pending[5][0].delta}
    arrays[part][1] = bad
    with np.errstate(over="ignore", invalid="ignore"), pytest.raises(BadFrame, match="out of range"):
        transferred({0: state}, store_of("b", rule))


def value_store() -> ShardStore:
    """A store of a run without a model."""
    return ShardStore(IDS["a"], [(0, 0)] * 2, 0, SUM)


def with_values(store: ShardStore, shard: int, count: int) -> ShardState:
    """A state with values, a refused update and several pieces."""
    state = store.fresh_state(shard, np.zeros(0, np.float32))
    for number in range(1, count + 1):
        key = encode_key(f"k{number}")
        update = KeyUpdate(IDS["x"], 1, number, key, "replace", encode_value("k", b"v" * 100_000), number)
        refused = [(0, "no")] if number == 2 else []
        state.apply_batch(DeltaId(IDS["a"], 1, number), ValueBatch(number, [update], [KeyResult(key, number)], refused))
    return state


def test_a_table_of_values_arrives_whole() -> None:
    """Its values, the updates that it has, and why some were refused; an empty one too."""
    store = value_store()
    sent = {0: with_values(store, 0, 7), 1: with_values(store, 1, 0)}
    found = transferred(sent, value_store())
    for shard, state in sent.items():
        assert found[shard].table == state.table
        assert (found[shard].version, found[shard].applied.rows()) == (state.version, state.applied.rows())


def test_a_table_that_is_torn_is_refused() -> None:
    """A state without the rest of its values is none."""
    store = value_store()
    state = with_values(store, 0, 7)
    head = describe(0, term(7, "a"), state)
    body = list(shard_states.body([(head, state)]))

    async def receive(buffers: list[Buffer]) -> None:
        await shard_states.read_state(FrameReader(stream(buffers)), 0, store, ANY_STEPS, InlineExecutor())

    with pytest.raises(BadFrame):
        asyncio.run(receive(body[:-2]))
    body[3] = b"\xc1" * len(body[3])
    with pytest.raises(BadFrame, match="no table"):
        asyncio.run(receive(body))


RULE = Rule(outer_lr=0.5, outer_momentum=0.5)


def full_state() -> ShardState:
    state = zeros(store_of("a", RULE))
    for step in (1, 2, 5):
        state.apply(DeltaId(IDS["x"], 1, step), 0.4, np.full(4, float(step), np.float32), RULE)
        state.norms.note(IDS["x"], 1, step, float(step))
    for step in (7, 6):
        state.add_pending(DeltaId(IDS["b"], 2, step), 0.25, np.full(4, float(step), np.float32), momentum=step == 7)
    state.era_step, state.era_term, state.folded_step = 3, (2, IDS["c"]), 5
    return state


def with_version(head: StateHead, version: int) -> StateHead:
    return msgspec.structs.replace(head, version=version)


def test_a_restored_state_is_the_described_one() -> None:
    """Every field, with the pending deltas in the order of the head."""
    before = full_state()
    head = describe(0, term(4, "a"), before)
    assert before.momentum is not None

    arrays = [item.delta for item in before.pending_deltas()]
    after = restore(head, before.parameters, before.value, before.momentum, arrays)

    assert describe(0, term(4, "a"), after) == head
    assert (head.term, head.has_momentum, [row[2] for row in head.pending]) == (term(4, "a"), True, [6, 7])
    assert [(item.delta[0], item.momentum) for item in after.pending_deltas()] == [(6.0, False), (7.0, True)]
    for step in (8, 9):
        for state in (before, after):
            state.apply(DeltaId(IDS["x"], 1, step), 0.4, np.ones(4, np.float32), RULE)
    assert after.value.tobytes() == before.value.tobytes()


def test_a_state_without_momentum_is_restored_without() -> None:
    """Nothing is allocated for it."""
    state = zeros(store_of("a"))

    after = restore(describe(0, term(1, "a"), state), state.parameters, state.value, None, [])

    assert after.momentum is None


def test_every_pending_delta_needs_its_array() -> None:
    """A missing array is an error, not a shorter state."""
    before = full_state()

    with pytest.raises(ValueError, match="zip"):
        restore(describe(0, term(4, "a"), before), before.parameters, before.value, None, [])


def test_what_a_state_has_forgotten_travels_with_it() -> None:
    """A learner refuses what its owner refuses."""
    state = ShardState(np.zeros(2, np.float32), 2)
    state.applied.add(DeltaId(b"n" * 20, 2, 9))
    state.applied.before = 4
    head = msgspec.msgpack.decode(msgspec.msgpack.encode(describe(0, Term(1, b"n" * 20), state)), type=StateHead)

    again = restore(head, 2, state.value, None, []).applied
    assert again == state.applied
    assert [again.may_have_forgotten(DeltaId(b"p" * 20, 1, step)) for step in (3, 4)] == [True, False]


@pytest.mark.parametrize(("before", "reason"), [(51, "it has forgotten steps up to 51"), (50, "")])
def test_a_head_that_forgets_what_is_still_to_come_is_not_believed(before: int, reason: str) -> None:
    """It would have the deltas of a living node refused."""
    state = ShardState(np.zeros(2, np.float32), 2)
    state.applied.before = before

    assert implausible(describe(0, Term(1, b"n" * 20), state), PlausibleSteps(furthest=100, likely=50)) == reason


def test_what_follows_a_version_that_is_believed_is_believed_too() -> None:
    """The version of a state that a liar has sent goes on to be counted by honest nodes. A step later all of them take
    it from each other, however high it was."""
    now, later = PlausibleSteps(2_002_000, 202_000), PlausibleSteps(2_004_000, 204_000)
    head = describe(0, term(4, "a"), full_state())
    taken = [version for version in (10**n for n in range(15)) if not implausible(with_version(head, version), now)]
    assert 10**9 < taken[-1] < MAX_BELIEVED / 1000
    highest = now.furthest * DELTAS_PER_STEP
    assert not implausible(with_version(head, highest), now)
    assert implausible(with_version(head, highest + 1), now) == "its counts are too high"
    assert not implausible(with_version(head, highest + 1_000_000), later)


GENESIS = b"g" * 16
NODE, OTHER = b"n" * 20, b"o" * 20
BOUNDS = [(0, 5), (5, 9)]
#: The last two values are buffers: shard 1 has two parameters.
PARAMETERS = 7
FILE_RULE = Rule(outer_lr=0.7, outer_momentum=0.5)


def state(size: int, parameters: int, steps: int, held: int = 0) -> ShardState:
    made = ShardState(value=np.arange(size, dtype=np.float32), parameters=parameters)
    for step in range(1, steps + 1):
        made.apply(DeltaId(NODE, 2, step), 0.4, np.full(size, step / 3, np.float32), FILE_RULE)
    for step in range(steps + 1, steps + held + 1):
        made.add_pending(DeltaId(OTHER, 1, step), 0.4, np.full(size, step / 7, np.float32))
    return made


def both() -> list[tuple[int, Term, ShardState]]:
    return [(0, Term(4, NODE), state(5, 5, 3, held=2)), (1, Term(7, OTHER), state(4, 2, 1))]


def encoded(*, clean: bool) -> bytes:
    return b"".join(shard_states.encode(GENESIS, both(), clean=clean))


def test_states_come_back_bit_by_bit() -> None:
    """Value, momentum, pending deltas, identities, version and term."""
    found = shard_states.decode(encoded(clean=True), GENESIS, BOUNDS, PARAMETERS)

    for shard, kept, before in both():
        stored = found[shard]
        assert (stored.term, stored.clean) == (kept, True)
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
        after.fold(9, FILE_RULE)
        before.fold(9, FILE_RULE)
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
        shard_states.decode(change(encoded(clean=False)), GENESIS, BOUNDS, PARAMETERS)


def test_another_swarms_and_another_layouts_states_are_refused() -> None:
    """Another genesis, longer shards, fewer shards."""
    raw = encoded(clean=False)

    with pytest.raises(BadStates, match="swarm"):
        shard_states.decode(raw, b"h" * 16, BOUNDS, PARAMETERS)
    for bounds in ([(0, 6), (6, 10)], [(0, 5)], [(0, 4), (4, 8)]):
        with pytest.raises(BadStates, match="layout"):
            shard_states.decode(raw, GENESIS, bounds, PARAMETERS)


def test_a_damaged_file_costs_its_own_shards_only() -> None:
    """The states of the other files of a checkpoint are offered, and the damaged one is reported."""
    disk, log = MemoryDisk(), Lines()
    found = CheckpointState(
        run="r", genesis=GENESIS.hex(), layout_digest="", step=5, samples=0, optimizer_steps=0, marks=[]
    )
    folder = checkpoint.new_folder(disk, 5)
    for number, one in enumerate(both()):
        checkpoint.write_states(disk, folder, number, shard_states.encode(GENESIS, [one], clean=False))
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


def with_table(count: int) -> ShardState:
    made = ShardState(value=np.zeros(0, np.float32), parameters=0, table=ValueTable())
    for number in range(1, count + 1):
        key = b"sk%d" % number
        update = KeyUpdate(OTHER, 1, number, key, "replace", b"v" * 50_001, number)
        made.apply_batch(DeltaId(NODE, 1, number), ValueBatch(number, [update], [KeyResult(key, number)]))
    return made


def test_tables_of_values_come_back_whole() -> None:
    """Values, known updates, identities, version and term, of full and of empty tables."""
    held = [(0, Term(4, NODE), with_table(12)), (1, Term(5, NODE), with_table(0))]
    raw = b"".join(shard_states.encode(GENESIS, held, clean=True))
    found = shard_states.decode(raw, GENESIS, NO_MODEL, 0)
    for shard, kept, state in held:
        assert found[shard].term == kept
        assert found[shard].clean
        assert found[shard].state.table == state.table
        assert found[shard].state.applied.rows() == state.applied.rows()
    with pytest.raises(BadStates, match="another layout"):
        shard_states.decode(raw, GENESIS, NO_MODEL[:1], 0)
