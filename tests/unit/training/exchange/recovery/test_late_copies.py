"""A node that comes after its swarm was started again without it: what its disk has is counted and kept."""

from __future__ import annotations

import asyncio

import numpy as np

from tests.harness.builders.stores import BOUNDS, IDS, PARAMETERS, contact, term
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import GENESIS
from tests.unit.training.exchange.recovery.test_reconciliation import reconcile, split
from training.exchange.messages import Push
from training.exchange.recovery.acknowledged import Acknowledged, AcknowledgedKey
from training.exchange.store.records import StoredState
from training.exchange.store.repair_log import RepairLog
from training.exchange.store.state_files import decode as decode_states
from training.exchange.terms import GENERATION, Term
from training.shards.applied import DeltaId


def test_a_copy_from_disk_with_less_is_kept_in_a_file_and_its_deltas_are_reported_once() -> None:
    """The owner went on with deltas 1 and 2, a late node's disk has 1 and 3. Taking the shard back would lose as much:
    delta 3 is reported, once, and the late copy can be read from its file."""

    async def scenario() -> None:
        high, low = split()
        state = high.store.owned[0].state
        state.era_step, state.era_term = 1, (3, IDS["b"])
        high.store.log = RepairLog(0, 0.0)
        late = low.store.owned.pop(0).state
        low.store.log = RepairLog(0, 0.0)
        high.store.owned[0].term = Term(GENERATION, IDS["a"])
        low.store.note_owner(0, Term(GENERATION, IDS["a"]), contact("a"))
        low.store.stored = {0: StoredState(term(3, "b"), late, clean=False)}
        low.reconciler.remember_disk()
        low.store.settle_stored()
        await reconcile(low)
        await asyncio.sleep(1.0)
        await reconcile(low)

        assert high.value == 21.0
        (lost,) = high.events("deltas_lost_in_restart")
        assert (lost["count"], lost["deltas"]) == (1, [f"{IDS['x'].hex()[:8]}/1:3-3"])
        assert high.context.counters.lost_in_restarts == 1
        (kept,) = low.events("late_copy_kept_aside")
        raw = low.context.environment.disk.read(kept["file"])
        assert raw is not None
        again = decode_states(raw, GENESIS, BOUNDS, PARAMETERS, 0.0)
        np.testing.assert_array_equal(again[0].state.value, late.value)

        low.reconciler.remember_disk()
        await reconcile(low)
        assert high.context.counters.lost_in_restarts == 1

    run(scenario())


def test_a_node_that_trained_on_while_its_swarm_was_started_again_tells_what_it_has_recorded() -> None:
    """The owner is the one of before, and lacks two deltas of this node: one can be sent again, and is waited for. The
    other is counted as lost, once. What is still on its way is not."""

    async def scenario() -> None:
        high, low = split()
        store, context, me = low.store, low.context, IDS["b"]
        store.owned.pop(0)
        store.note_owner(0, term(4, "a"), contact("a"))
        low.reconciler.remember_disk()
        for step in (1, 2, 3):
            identity = DeltaId(me, 1, step)
            context.record.begin(identity, 0)
            context.record.end(identity, is_added=True)
        context.kept.keep(DeltaId(me, 1, 3), {})
        push = Push(GENESIS, me, 1, 1, 0, 1.0, [])
        context.acknowledged.note(0, Acknowledged(push, IDS["a"], 0.0, "float32", 4, bytes(16)))
        await reconcile(low)
        assert not high.events("deltas_lost_in_restart")

        high.store.owned[0].term = Term(GENERATION, IDS["a"])
        store.note_owner(0, Term(GENERATION, IDS["a"]), contact("a"))
        context.acknowledged.doubt(IDS["a"])
        await asyncio.sleep(1.0)
        await reconcile(low)
        assert not high.events("deltas_lost_in_restart"), "its delta of step 1 is to be sent first"
        high.store.owned[0].state.applied.add(DeltaId(me, 1, 1))
        context.acknowledged.moved(AcknowledgedKey(0, DeltaId(me, 1, 1)), IDS["a"])
        for _ in range(2):
            await asyncio.sleep(1.0)
            await reconcile(low)
        (lost,) = high.events("deltas_lost_in_restart")
        assert (lost["count"], lost["deltas"]) == (1, [f"{me.hex()[:8]}/1:2-2"])

    run(scenario())
