"""The exchange of one node, composed: founding, what it passes to its services, fences on disk, and the end."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.peers import PeerChange
from p2pnode.overlay.transport import TransportError
from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.exchange.fence_file import FENCES_FILE
from p2pnode.training.exchange.messages import LocateOwnersAnswer, Push, PushAnswer, PushResult, decode
from p2pnode.training.exchange.run_state import Phase, RunState
from p2pnode.training.exchange.swarm_view import LASTING_S
from p2pnode.training.exchange.terms import OwnerInfo
from p2pnode.training.layout import Layout
from p2pnode.training.manifest import PROTOCOL, Manifest
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.outer_rule import Rule
from tests.harness.builders.stores import IDS, contact, term
from tests.harness.environment.simulated import InlineExecutor, ListLog, MemoryDisk, VirtualClock
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import GENESIS, ScriptedSwarm
from tests.harness.swarms.exchange_swarm import StartEntropy
from tests.harness.trainers.stub_trainer import plain_layout

ME, OTHER = contact("a"), contact("b")
VALUES, SHARDS = 16, 4
SETTINGS = ExchangeSettings(codec="float32", shards=SHARDS, weight="sum", outer_lr=1.0, outer_momentum=0.0)


def exchange_of(
    swarm: ScriptedSwarm,
    disk: MemoryDisk,
    *,
    barrier: str = "relaxed",
    staleness: int | None = 4,
    settings: ExchangeSettings = SETTINGS,
    values: int = VALUES,
) -> Exchange:
    manifest = Manifest(
        protocol=PROTOCOL,
        run="run",
        genesis=GENESIS.hex(),
        task="stub",
        task_version="1",
        layout=plain_layout(values) if values else Layout(()),
        frozen_digest="",
        shards=SHARDS,
        rule=Rule(1.0, 0.0, ""),
        weight="sum",
        replicas=1,
        local_steps=1,
        barrier_family=barrier,
        max_steps=0,
        until="",
    )
    clock = VirtualClock()
    environment = Environment(
        clock=clock,
        entropy=StartEntropy("exchange"),
        disk=disk,
        executor=InlineExecutor(),
        log=ListLog([], "", clock),
    )
    return Exchange(
        swarm=cast(Any, swarm),
        manifest=manifest,
        settings=settings,
        staleness=staleness,
        replica=np.arange(values, dtype=np.float32),
        incarnation=1,
        environment=environment,
    )


def test_a_founder_owns_every_shard_with_the_replicas_values() -> None:
    """Its own push is added at once, and the next pull brings it into the replica."""

    async def scenario() -> None:
        exchange = exchange_of(ScriptedSwarm(ME), MemoryDisk())
        await exchange.start()
        await exchange.found()
        assert sorted(exchange.store.owned) == list(range(SHARDS))

        report = await exchange.push(1, 0, 1.0, np.ones(VALUES, np.float32))
        assert (report.acknowledged, report.outstanding) == (SHARDS, 0)
        assert (await exchange.pull(1)).changed == SHARDS
        assert exchange.replica.vector.tolist() == [value + 1.0 for value in range(VALUES)]
        assert exchange.versions() == [(term(1, "a"), 1)] * SHARDS
        await exchange.stop()

    run(scenario(), strict=True)


def test_a_pull_gives_an_owner_up_as_soon_as_it_is_found_dead() -> None:
    """Its request in flight ends then, and not with a timeout of seconds; a suspicion ends none."""

    async def scenario() -> None:
        swarm = ScriptedSwarm(ME, [OTHER])
        swarm.request_s = 4.0
        swarm.answers["pull"] = swarm.answers["where_is"] = lambda *_: LocateOwnersAnswer([])
        exchange = exchange_of(swarm, MemoryDisk())
        await exchange.start()
        for shard in range(SHARDS):
            exchange.store.note_owner(shard, term(1, "b"), OTHER)
        pulling = asyncio.ensure_future(exchange.pull(1))
        await asyncio.sleep(0.5)
        for callback in swarm.callbacks:
            callback(PeerChange(OTHER.node_id, "suspect"))
        await asyncio.sleep(0.5)
        assert OTHER.node_id not in swarm.suspected

        swarm.gone.append(OTHER.node_id)
        for callback in swarm.callbacks:
            callback(PeerChange(OTHER.node_id, "dead"))
        await asyncio.sleep(0.01)
        assert OTHER.node_id in swarm.suspected
        pulling.cancel()
        await asyncio.wait([pulling])
        await exchange.stop()

    run(scenario(), strict=True)


def test_large_shards_are_founded_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that another node has claimed meanwhile is left to it, and a delta that is not finite is refused."""
    monkeypatch.setattr("p2pnode.training.cooperative.VALUES_PER_TURN", 1)

    async def scenario() -> None:
        exchange = exchange_of(ScriptedSwarm(ME), MemoryDisk())
        executor, names = exchange.environment.executor, []
        run_in_thread = executor.run

        async def noted(function: Any, /, *args: Any, **kwargs: Any) -> Any:
            names.append(function.__name__)
            found = await run_in_thread(function, *args, **kwargs)
            if function.__name__ == "fresh_state" and names.count("fresh_state") == 2:
                exchange.store.note_owner(1, term(1, "b"), OTHER)
            return found

        monkeypatch.setattr(executor, "run", noted)
        await exchange.found()
        assert sorted(exchange.store.owned) == [0, 2, 3]
        assert names.count("fresh_state") == SHARDS

        exchange.store.ownership.forget_node(OTHER.node_id)
        names.clear()
        await exchange.found()
        assert sorted(exchange.store.owned) == list(range(SHARDS))
        delta = np.ones(VALUES, np.float32)
        delta[5] = np.nan
        report = await exchange.push(1, 0, 1.0, delta)
        assert (report.acknowledged, report.refused) == (SHARDS - 1, {"not_finite": 1})
        assert names.count("fresh_state") == 1

    run(scenario())


def test_a_node_alone_adds_its_deltas_to_its_own_vector() -> None:
    """With `exchange.enabled = false` every delta is in the replica once, and one that is not finite is left out."""

    async def scenario() -> None:
        exchange = exchange_of(ScriptedSwarm(ME), MemoryDisk())
        for step in (1, 2):
            assert exchange.add_alone(np.full(VALUES, step / 4, np.float32))
        assert not exchange.add_alone(np.full(VALUES, np.nan, np.float32))
        assert exchange.replica.vector.tolist() == [value + 0.75 for value in range(VALUES)]

    run(scenario())


def test_a_checkpoint_copies_the_vector_only_on_a_node_that_exchanges_nothing() -> None:
    """Its trainer changes all of the vector at once, and no owner has other copies: there it is that of one moment."""

    async def scenario() -> None:
        for enabled in (True, False):
            settings = msgspec.structs.replace(SETTINGS, enabled=enabled)
            exchange = exchange_of(ScriptedSwarm(ME), MemoryDisk(), settings=settings)
            reading = exchange.reading(lambda: None)
            assert exchange.add_alone(np.ones(VALUES, np.float32))
            read = np.concatenate([values.copy() for values in reading.slices()])
            assert read.tolist() == [value + enabled for value in range(VALUES)]
            assert reading.versions == exchange.versions()

    run(scenario())


@pytest.mark.parametrize(("staleness", "limit"), [(None, None), (0, 10), (4, 16), (25, 100)])
def test_the_stale_limit_follows_the_staleness(staleness: int | None, limit: int | None) -> None:
    """Four times the staleness, at least ten steps; without a staleness there is none."""

    async def scenario() -> None:
        exchange = exchange_of(ScriptedSwarm(ME), MemoryDisk(), staleness=staleness)
        assert exchange.stale_limit == limit
        assert not exchange.synchronous
        assert exchange_of(ScriptedSwarm(ME), MemoryDisk(), barrier="bsp").synchronous

    run(scenario())


def test_steps_and_incarnation_are_told_by_calls() -> None:
    """The own step counts in the median; pushes carry the new incarnation, and the count of their weight. An owner that
    counts otherwise is noted."""

    async def scenario() -> None:
        swarm = ScriptedSwarm(ME, [OTHER])

        def answer(_to: object, payload: bytes) -> PushAnswer:
            return PushAnswer([PushResult(shard, "ok") for shard in decode(payload, Push).shards], workers=9.0)

        swarm.answers["push"] = answer
        swarm.worker_count = 2.0
        exchange = exchange_of(swarm, MemoryDisk())
        for shard in range(SHARDS):
            exchange.store.note_owner(shard, term(1, "b"), OTHER)
        swarm.gone.append(OTHER.node_id)
        exchange.begin_at(5)
        assert exchange.view.median_step() == 5
        exchange.advance(6)
        assert exchange.view.median_step() == 6
        swarm.gone.clear()

        exchange.run.incarnation = 3
        await exchange.push(7, 6, 1.0, np.ones(VALUES, np.float32))
        await asyncio.sleep(LASTING_S)
        await exchange.push(8, 7, 1.0, np.ones(VALUES, np.float32))
        sent = [(push.incarnation, push.step, push.workers) for push in swarm.sent("push", Push)]
        assert sent == [(3, 7, 2.0), (3, 8, 2.0)]
        assert exchange.view.counts.lasting() == [(OTHER.node_id, 9.0)]

    run(scenario())


def test_fences_survive_a_restart_but_not_another_swarm() -> None:
    """A node that comes back rejects the owners that it rejected before."""

    async def scenario() -> None:
        disk = MemoryDisk()
        exchange = exchange_of(ScriptedSwarm(ME), disk)
        await exchange.start()
        exchange.store.ownership.raise_fence(2, term(7, "x"))
        await asyncio.sleep(1.5)
        await exchange.stop()
        assert exchange_of(ScriptedSwarm(ME), disk).store.ownership.fence(2) == term(7, "x")

        disk.tear(FENCES_FILE)
        assert exchange_of(ScriptedSwarm(ME), disk).store.ownership.fence(2) == term(0, "a")._replace(node=b"")

    run(scenario())


def test_a_closed_exchange_adds_nothing_and_knows_that_its_states_are_complete() -> None:
    """From then on a push is answered with `retry`, so that its origin keeps the delta."""

    async def scenario() -> None:
        exchange = exchange_of(ScriptedSwarm(ME, [OTHER]), MemoryDisk())
        await exchange.found()
        exchange.store.owned[0].backup = OTHER
        assert not exchange.is_clean()

        await exchange.close(1.0)

        assert exchange.is_clean()
        assert [shard for shard, _, _ in exchange.store.states_to_save()] == list(range(SHARDS))
        assert exchange.run.is_drained

    run(scenario())


def test_a_joiner_learns_the_owners_from_one_peer() -> None:
    """A peer that does not answer is an error: the node asks another one."""

    async def scenario() -> None:
        swarm = ScriptedSwarm(ME, [OTHER])
        known = [OwnerInfo.of(shard, term(2, "b"), OTHER) for shard in range(SHARDS)]
        swarm.answers["where_is"] = lambda *_: LocateOwnersAnswer(known)
        exchange = exchange_of(swarm, MemoryDisk())
        await exchange.directory.learn_all(OTHER)
        groups, unknown = exchange.directory.by_owner(range(SHARDS))
        assert [owner.node_id for owner, _ in groups] == [IDS["b"]]
        assert unknown == []

        swarm.answers["where_is"] = lambda *_: TransportError("timeout", OTHER.address, "was silent")
        with pytest.raises(TransportError):
            await exchange.join(OTHER)

    run(scenario())


def test_the_codec_is_chosen_once_for_each_push() -> None:
    """By the time that its training took: what is decided twice in a row needs two pushes."""

    async def scenario() -> None:
        exchange = exchange_of(ScriptedSwarm(ME), MemoryDisk())
        await exchange.start()
        await exchange.found()
        decided: list[float] = []
        exchange.codec.decide = lambda facts: bool(decided.append(facts.step_s))  # type: ignore[method-assign]
        delta = np.ones(VALUES, np.float32)

        await exchange.push(1, 0, 1.0, delta, train_s=2.0)
        assert decided == [2.0]
        await exchange.push(2, 1, 1.0, delta)
        assert decided == [2.0, 2.0]
        await exchange.stop()

    run(scenario(), strict=True)


def test_a_phase_includes_the_earlier_ones_and_is_never_left_backwards() -> None:
    """A drained node is closed and leaving too; a late call for an earlier phase changes nothing."""
    run = RunState(incarnation=1)
    assert not run.is_leaving

    run.enter(Phase.LEAVING)
    assert (run.is_leaving, run.is_closed, run.is_drained) == (True, False, False)
    run.enter(Phase.DRAINED)
    run.enter(Phase.CLOSED)
    assert (run.is_leaving, run.is_closed, run.is_drained) == (True, True, True)


def test_the_last_barrier_passed_never_goes_back() -> None:
    """A pull for an older step does not undo a later one."""
    run = RunState(incarnation=1)
    run.pass_barrier(5)
    run.pass_barrier(3)
    assert run.passed_step == 5
