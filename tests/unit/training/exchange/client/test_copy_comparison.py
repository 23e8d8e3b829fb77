"""After a pull a backup compares the replica, which holds what the owner has published, with its own copy."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy as np

from tests.harness.builders.stores import IDS, backup_of, contact, delta, store_of, term
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of
from training.exchange.audit_records.published_values import POSITIONS, STALE_S, UNADDED, CopyVerdict
from training.exchange.client.copy_comparison import CopyComparison
from training.exchange.messages import PullResult
from training.exchange.store.shard_store import ShardStore


class Pulled:
    """A backup "b" of the owner "a", which forwards a delta each second and publishes it as `publishes` says."""

    def __init__(self, store: ShardStore) -> None:
        self.store = store
        self.context: Any = context_of(ScriptedSwarm(contact("b"), [contact("a")]), store)
        self.comparison = CopyComparison(self.context)
        self.step = 1

    async def second(self, share: float, owner: str = "a", *, is_fit: bool = True, version: int | None = None) -> None:
        await asyncio.sleep(1.0)
        self.step += 1
        self.store.accept_forward(0, term(1, "a"), delta(self.step), 0, IDS["a"])
        self.context.replica.slice_of(0)[:] += np.float32(share)
        state = self.store.backed[0].state
        assert state is not None
        result = PullResult(0, "value", *term(1, "a"), state.version if version is None else version)
        if is_fit:
            self.comparison.pulled(IDS[owner], result, ["float32"])
        else:
            self.comparison.unfit(IDS[owner], 0)

    def verdict(self) -> CopyVerdict:
        doubt = self.context.published_values.take_doubts().get(0)
        return CopyVerdict.FITS if doubt is None else doubt.verdict


def test_an_owner_that_publishes_what_it_forwards_fits_and_others_do_not() -> None:
    async def scenario() -> None:
        for share, found in [(1.0, CopyVerdict.FITS), (0.1, CopyVerdict.DIFFERS), (0.0, CopyVerdict.DIFFERS)]:
            one = Pulled(backup_of("b", "a"))
            for _ in range(20):
                await one.second(share)
            assert one.verdict() is found

    run(scenario())


def test_what_another_node_serves_is_not_compared() -> None:
    """Nor with a copy that is none yet, or no more."""

    async def scenario() -> None:
        one = Pulled(backup_of("b", "a"))
        for _ in range(20):
            await one.second(0.0, "c")
        assert one.verdict() is CopyVerdict.FITS
        learner = store_of("b")
        assert learner.begin_catch_up(0, term(1, "a"), contact("a"))
        comparison = CopyComparison(context_of(ScriptedSwarm(contact("b")), learner))
        comparison.pulled(IDS["a"], PullResult(0, "value", *term(1, "a"), 3))
        comparison.unfit(IDS["a"], 0)

    run(scenario())


def test_another_copy_of_the_shard_is_compared_from_its_beginning() -> None:
    async def scenario() -> None:
        one = Pulled(backup_of("b", "a"))
        for number in range(40):
            await one.second(0.0)
            if number % 5 == 0:
                one.store.backed[0] = backup_of("b", "a").backed[0]
        assert one.verdict() is CopyVerdict.FITS

    run(scenario())


def test_old_values_and_answers_that_lead_to_nothing_are_stale() -> None:
    """Once the owner has had time to publish what it forwarded."""

    async def scenario() -> None:
        for is_fit in (True, False):
            one = Pulled(backup_of("b", "a"))
            await one.second(1.0)
            for number in range(int(STALE_S) + UNADDED + 3):
                await one.second(1.0, is_fit=is_fit, version=1)
                assert number > STALE_S + UNADDED - 2 or one.verdict() is CopyVerdict.FITS
            assert one.verdict() is CopyVerdict.STALE

    run(scenario())


def test_a_large_shard_is_compared_at_places_of_this_node_s_choice() -> None:
    """All values of a small one."""

    async def scenario() -> None:
        comparison = CopyComparison(context_of(ScriptedSwarm(contact("b")), store_of("b")))
        assert comparison._places(4).tolist() == [0, 1, 2, 3]
        places, others = comparison._places(100_000), comparison._places(100_000)
        assert (len(set(places.tolist())), int(places.max()) < 100_000) == (POSITIONS, True)
        assert places.tolist() != others.tolist()

    run(scenario())


def test_a_copy_that_is_dropped_is_not_kept_in_memory() -> None:
    """Its arrays may be in a file that is full."""

    async def scenario() -> None:
        one = Pulled(backup_of("b", "a"))
        for _ in range(20):
            await one.second(0.0)
        state = one.store.backed[0].state
        assert state is not None
        array = weakref.ref(state.value)
        del state
        one.store.backed.clear()
        gc.collect()
        assert array() is None
        assert one.verdict() is CopyVerdict.DIFFERS

    run(scenario())
