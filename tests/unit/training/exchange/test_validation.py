"""Validation of a delta: finite values, weights, clipping, and the limits on pending deltas.

Values out of range are found at little cost, and nothing of them is served.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from p2pnode.training.exchange.delta import IncomingDelta
from p2pnode.training.exchange.messages import Push, PushResult
from p2pnode.training.exchange.owner.validation import (
    INSPECTION_INTERVAL_S,
    MAX_PENDING_PER_NODE,
    SAMPLE_FACTOR,
    UNUSUAL_STEPS,
    WEIGHT_FACTOR,
    DeltaValidator,
    ShardInspector,
    is_good,
)
from p2pnode.training.exchange.store.records import BufferedDelta
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.shards.state import ShardState
from tests.harness.builders.stores import IDS, backup_of, contact, delta, owner_of, store_of, term, zeros
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.stubs.exchange_context import ExchangeContext, ScriptedSwarm, context_of, records_of

ME = contact("a")
IDENTITY = DeltaId(IDS["x"], 1, 1)
PUSH = Push(IDS["x"], 1, 1, 0, 1.0, [0])
CLIP = Rule(outer_lr=1.0, outer_momentum=0.0, robust="clip")


def validator_of(store: ShardStore, *, workers: float = 1.0, **options: Any) -> tuple[DeltaValidator, ExchangeContext]:
    swarm = ScriptedSwarm(ME)
    swarm.worker_count = workers
    context = context_of(swarm, store, **options)
    return DeltaValidator(
        context.store, context.view, context.run.counters, context.settings, context.environment
    ), context


def item_of(*values: float, repair: bool = False) -> IncomingDelta:
    array = np.array(values, dtype=np.float32)
    return IncomingDelta(0, array, array.tobytes(), "float32", repair=repair)


def clipping_owner() -> ShardStore:
    store = store_of("a", CLIP)
    store.own(0, zeros(store), term(1, "a"), ME, 0.0, by_handover=False)
    return store


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@run_by(run)
async def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    """Permanently, and counted."""
    validator, context = validator_of(owner_of("a"))

    assert validator.validate(PUSH, IDENTITY, item_of(1.0, bad)) == PushResult.refused(0, "not_finite")
    assert context.run.counters.refused_here == {"not_finite": 1}


@run_by(run)
async def test_a_weight_is_clamped_around_the_plain_share() -> None:
    """Within the lag of two population estimates; by samples four times wider; a repair has no lower bound. One that
    was made with fewer workers is corrected before."""
    share = 1 / 8
    population = ExchangeSettings(weight="population")
    validator, _ = validator_of(owner_of("a"), workers=8.0, settings=population)
    assert validator.clamp_weight(1.0) == share * WEIGHT_FACTOR
    assert validator.clamp_weight(0.001) == share / WEIGHT_FACTOR
    assert validator.clamp_weight(share) == share
    assert validator.clamp_weight(0.001, repair=True) == 0.001
    rate = math.sqrt(8)
    assert validator.clamp_weight(share * rate, plain=True) == share * rate
    assert validator.clamp_weight(1.0, plain=True) == pytest.approx(share * WEIGHT_FACTOR * rate)
    hidden = 1 / 2
    assert validator.clamp_weight(hidden, 2.0) == share
    assert validator.clamp_weight(hidden * rate, 2.0, plain=True) == share * rate
    assert validator.clamp_weight(share / 2, 16.0) == share / 2
    few, _ = validator_of(owner_of("a"), workers=3.0, settings=population)
    assert few.clamp_weight(2.0, plain=True) == 1.0

    samples, _ = validator_of(owner_of("a"), workers=8.0, settings=ExchangeSettings(weight="samples"))
    assert samples.clamp_weight(SAMPLE_FACTOR * hidden, 2.0) == SAMPLE_FACTOR * share
    added, _ = validator_of(owner_of("a"), workers=8.0, settings=ExchangeSettings(weight="sum"))
    assert added.clamp_weight(1.0, 2.0) == 1.0
    assert samples.clamp_weight(0.001) == share / WEIGHT_FACTOR / SAMPLE_FACTOR
    plain, _ = validator_of(owner_of("a"), workers=8.0)
    assert plain.clamp_weight(0.25) == 1.0


@run_by(run)
async def test_a_node_may_have_a_limited_number_of_pending_deltas() -> None:
    """Beyond it the delta is to be sent again; those of other nodes do not count."""
    store = owner_of("a", synchronous=True)
    validator, _ = validator_of(store)
    for step in range(1, MAX_PENDING_PER_NODE + 1):
        store.add(0, delta(step))

    assert validator.validate(PUSH, IDENTITY, item_of(1.0)) == PushResult.retry(0, "too_many_pending")
    assert validator.validate(PUSH, DeltaId(IDS["b"], 1, 1), item_of(1.0)) is None


@run_by(run)
async def test_a_long_delta_is_clipped_to_the_median_length() -> None:
    """Under the rule `clip`; the factor is for the weight, the values are left."""
    store = clipping_owner()
    for node in range(3):
        store.owned[0].state.norms.note(bytes([node]) * 20, 1, 1, 2.0)
    validator, _ = validator_of(store, workers=3.0)
    long, short = item_of(8.0, 0.0), item_of(1.0, 0.0)

    assert validator.validate(PUSH, IDENTITY, long) is None
    assert validator.validate(PUSH, IDENTITY, short) is None

    assert (long.norm, long.scale, long.delta[0]) == (8.0, 0.25, 8.0)
    assert (short.norm, short.scale) == (1.0, 1.0)


@run_by(run)
async def test_the_first_deltas_wait_until_there_is_a_median() -> None:
    """Three members have to send one before any is accepted: a quick one alone could write any value."""
    validator, _ = validator_of(clipping_owner(), workers=3.0)
    identities = [DeltaId(bytes([node]) * 20, 1, 1) for node in range(3)]

    results = [validator.validate(PUSH, identity, item_of(2.0)) for identity in identities]

    assert results == [PushResult.retry(0, "no_norms_yet")] * 2 + [None]


@run_by(run)
async def test_lengths_that_stay_unusual_are_warned_about_now_and_then() -> None:
    """Each one is counted; a warning comes after ten steps, and after ten more."""
    store = owner_of("a")
    for node in range(3):
        store.owned[0].state.norms.note(bytes([node]) * 20, 1, 1, 1.0)
    validator, context = validator_of(store, workers=3.0)
    warned = []
    for step in range(1, 2 * UNUSUAL_STEPS + 1):
        item, identity = item_of(100.0), DeltaId(IDENTITY.node, IDENTITY.incarnation, step)
        assert validator.validate(PUSH, identity, item) is None
        validator.note_added(identity, item)
        validator.note_added(identity, item)  # another shard of the same step
        warned.append(len(records_of(context)))

    assert context.run.counters.unusual_norms == 4 * UNUSUAL_STEPS
    assert [warned.index(count) + 1 for count in (1, 2)] == [UNUSUAL_STEPS, 2 * UNUSUAL_STEPS]
    assert {record.event for record in records_of(context)} == {"delta_norm_unusual"}


@run_by(run)
async def test_single_unusual_steps_and_shards_are_ordinary_training() -> None:
    """A long delta every other step, and one long shard of three in every step, warn of nobody."""
    store = owner_of("a")
    for node in range(3):
        store.owned[0].state.norms.note(bytes([node]) * 20, 1, 1, 1.0)
    validator, context = validator_of(store, workers=3.0)
    for step in range(1, 40):
        for length in (100.0, 1.0, 1.0) if step > 20 else (100.0 if step % 2 else 1.0,):
            item, identity = item_of(length), DeltaId(IDENTITY.node, 1, step)
            assert validator.validate(PUSH, identity, item) is None
            validator.note_added(identity, item)

    assert context.run.counters.unusual_norms > 20
    assert records_of(context) == []


def pushed(validator: DeltaValidator, store: ShardStore, node: str, step: int, *values: float) -> str:
    """The answer to a delta; one that may be added is added."""
    identity = DeltaId(IDS[node], 1, step)
    item = item_of(*values)
    result = validator.validate(PUSH, identity, item)
    if result is not None:
        return f"{result.status} {result.reason}"
    store.add(0, BufferedDelta(identity, 1.0, item.delta, item.encoded, norm=item.norm or 0.0))
    validator.note_added(identity, item)
    return "ok"


@run_by(run)
async def test_a_delta_of_the_largest_numbers_is_refused_at_any_time() -> None:
    """They are finite, and their sum is not: before and after others have sent theirs, and as a repair."""
    store = owner_of("a")
    validator, context = validator_of(store, workers=3.0)
    largest = [3e38, -3e38, 3e38, 3e38]
    assert pushed(validator, store, "x", 1, *largest) == "refused out_of_range"
    for node in "bcd":
        assert pushed(validator, store, node, 1, *[0.5] * 4) == "ok"
    assert pushed(validator, store, "x", 2, *largest) == "refused out_of_range"
    repaired = validator.validate(PUSH, IDENTITY, item_of(*largest, repair=True))
    assert repaired == PushResult.refused(0, "out_of_range")
    assert np.abs(store.owned[0].state.value).max() < 10.0
    assert context.run.counters.refused_here == {"out_of_range": 3}


@run_by(run)
async def test_a_delta_a_thousand_times_as_long_as_those_of_the_others_is_refused() -> None:
    """One of hundreds of times is added: deltas grow when training begins. One that is usual for values is, too."""
    store = owner_of("a")
    validator, _ = validator_of(store, workers=3.0)
    for node in "bcd":
        assert pushed(validator, store, node, 1, *[0.01] * 4) == "ok"
    assert pushed(validator, store, "b", 2, *[5.0] * 4) == "ok"
    assert pushed(validator, store, "x", 2, *[11.0] * 4) == "refused out_of_range"
    for node in "bcd":
        assert pushed(validator, store, node, 3, *[1e-9] * 4) == "ok"
    assert pushed(validator, store, "x", 4, *[0.09] * 4) == "ok"


@run_by(run)
async def test_the_first_member_alone_does_not_set_the_measure() -> None:
    """A first delta of unusual length waits for those of two others, and is refused if it is far above theirs. If all
    are that long, as the buffers of a model may be, they are added."""
    store = owner_of("a")
    validator, _ = validator_of(store, workers=3.0)
    assert pushed(validator, store, "x", 1, *[1e8] * 4) == "retry no_norms_yet"
    assert pushed(validator, store, "x", 2, *[1e8] * 4) == "retry no_norms_yet"
    for node in "bcd":
        assert pushed(validator, store, node, 1, *[1.0] * 4) == "ok"
    assert pushed(validator, store, "x", 1, *[1e8] * 4) == "refused out_of_range"

    store = owner_of("a")
    validator, _ = validator_of(store, workers=3.0)
    answers = [pushed(validator, store, node, 1, *[1e5] * 4) for node in "bcdbcd"]
    assert answers == ["retry no_norms_yet"] * 2 + ["ok"] * 4


@run_by(run)
async def test_a_node_alone_may_send_what_it_trains() -> None:
    """Nobody else's deltas can be waited for; only what would overflow is refused."""
    store = owner_of("a")
    validator, _ = validator_of(store, workers=1.0)
    assert pushed(validator, store, "b", 1, *[1e5] * 4) == "ok"
    assert pushed(validator, store, "b", 2, *[1e7] * 4) == "ok"
    assert pushed(validator, store, "b", 3, *[1e16] * 4) == "refused out_of_range"


def inspector_of(store: ShardStore):
    context = context_of(ScriptedSwarm(contact("a")), store)
    return ShardInspector(context.store, context.run.counters, context.rebalance, context.environment), context


@pytest.mark.parametrize("number", [np.nan, np.inf, -3e38])
@pytest.mark.parametrize("array", ["value", "momentum"])
@run_by(run)
async def test_a_shard_with_such_values_is_resigned(number: float, array: str) -> None:
    """Whichever array has them. The state is dropped, the fence rises, and the best copy is searched for."""
    store = owner_of("a")
    inspector, context = inspector_of(store)
    former = store.owned[0].term
    store.owned[0].state.momentum = np.zeros(4, np.float32)
    await inspector.inspect([0])
    getattr(store.owned[0].state, array)[2] = number
    await inspector.inspect([0])
    assert 0 in store.owned, "it was looked at a moment ago"
    await asyncio.sleep(INSPECTION_INTERVAL_S)
    await inspector.inspect([0])
    assert (store.owned, store.superseded) == ({}, {})
    assert store.ownership.fence(0) > former
    assert context.rebalance.collect_orphans() == [0]
    assert context.run.counters.shards_resigned == 1
    assert [(one.event, one.fields) for one in records_of(context)] == [("shard_resigned", {"shard": 0})]


def test_the_copy_of_a_backup_is_looked_at_once_a_second() -> None:
    """Unless the pass that adds a delta has seen every value."""
    store = backup_of("a", "b")
    state = store.backed[0].state
    assert state is not None
    assert is_good(state, 1.0)
    state.value[1] = np.nan
    assert is_good(state, 1.0 + INSPECTION_INTERVAL_S / 2)
    assert not is_good(state, 1.0 + INSPECTION_INTERVAL_S)


@run_by(run)
async def test_a_shard_that_trains_is_not_read_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass that adds a delta sees every value. One that leaves a value out of range does not count, nor one of a
    second ago."""
    looked: list[object] = []
    monkeypatch.setattr(ShardState, "is_in_range", lambda state: looked.append(state) or True)
    store = owner_of("a")
    inspector, context = inspector_of(store)
    state, clock = store.owned[0].state, context.environment.clock
    for step in range(1, 6):
        state.apply(DeltaId(b"x" * 20, 1, step), 1.0, np.ones(4, np.float32), store.rule)
        state.note_addition(clock.monotonic())
        await inspector.inspect([0])
        await asyncio.sleep(INSPECTION_INTERVAL_S / 2)
    assert looked == []
    await asyncio.sleep(INSPECTION_INTERVAL_S)
    await inspector.inspect([0])
    assert looked == [state]
    await asyncio.sleep(INSPECTION_INTERVAL_S)
    state.value[1] = np.inf
    state.apply(DeltaId(b"x" * 20, 1, 9), 1.0, np.ones(4, np.float32), store.rule)
    state.note_addition(clock.monotonic())
    await inspector.inspect([0])
    assert looked == [state, state]


def test_one_broken_shard_of_several_is_found() -> None:
    """Whichever it is of those that are looked at together; the others stay."""

    async def scenario(broken: int) -> None:
        store = store_of("a")
        for shard in range(4):
            store.own(shard, zeros(store, shard), term(1, "a"), contact("a"), 0.0, by_handover=False)
        inspector, _ = inspector_of(store)
        store.owned[broken].state.value[1] = np.nan
        await inspector.inspect(range(4))
        assert [shard for shard in range(4) if shard not in store.owned] == [broken]

    for broken in range(4):
        run(scenario(broken))
