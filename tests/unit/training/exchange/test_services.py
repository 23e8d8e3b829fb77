"""The services of one exchange: changes of members, their start and end, and what a division keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from overlay.peers import ChangeKind, PeerChange
from overlay.supervision import FIRST_PAUSE_S
from tests.harness.builders.stores import BOUNDS, IDS, PARAMETERS, SUM, contact, owner_of
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of, records_of
from training.exchange.divisions import Divisions
from training.exchange.services import ExchangeServices, divided_context, store_of
from training.exchange.store.shard_store import ShardStore
from training.settings import ExchangeSettings

NODE = IDS["b"]


def services_of(store: ShardStore) -> tuple[ScriptedSwarm, ExchangeServices]:
    swarm = ScriptedSwarm(contact("a"), [contact("b"), contact("c")])
    return swarm, ExchangeServices(context_of(swarm, store))


def play(
    scenario: Callable[[ScriptedSwarm, ExchangeServices], Awaitable[None]], store: ShardStore | None = None
) -> None:
    async def main() -> None:
        swarm, services = services_of(store or owner_of("a"))
        try:
            await scenario(swarm, services)
        finally:
            await services.stop()
            await services.stop()

    run(main())


class Calls:
    """Counts the calls of some methods, which do nothing more."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def of(self, name: str) -> Callable[..., None]:
        return lambda *_given: self.made.append(name)


def spied(services: ExchangeServices, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What `on_change` may tell others."""
    calls, context = Calls(), services.context
    for owner, name in (
        (type(services.reconciler), "on_change"),
        (type(context.store), "on_restart"),
        (type(context.claims), "forget"),
        (type(context.view.reliability), "returned"),
        (type(context.rpc), "found_dead"),
        (type(context.view), "invalidate"),
        (type(context.rebalance), "wake"),
    ):
        monkeypatch.setattr(owner, name, calls.of(name))
    return calls


CHANGES: dict[ChangeKind, set[str]] = {
    "up": {"invalidate", "wake"},
    "returned": {"returned", "invalidate", "wake"},
    "suspect": set(),
    "refuted": set(),
    "dead": {"forget", "found_dead", "invalidate", "wake"},
    "left": {"forget", "invalidate", "wake"},
    "restarted": {"on_restart", "forget", "returned", "invalidate", "wake"},
    "moved": set(),
    "eligible": {"invalidate", "wake"},
    "clone": set(),
    "twin": set(),
}


@pytest.mark.parametrize("kind", get_args(ChangeKind))
def test_a_change_of_a_member_reaches_those_whom_it_concerns(kind: ChangeKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reconciler hears of every one. What a restart makes void is dropped, and whoever owns what is looked at again
    when somebody comes, goes, or may own from now on."""

    async def scenario(_swarm: ScriptedSwarm, services: ExchangeServices) -> None:
        calls = spied(services, monkeypatch)
        services.on_change(PeerChange(NODE, kind))
        assert set(calls.made) == {"on_change"} | CHANGES[kind]
        assert len(calls.made) == len(set(calls.made))
        monkeypatch.undo()

    play(scenario)


def test_requests_are_served_from_the_start_on() -> None:
    """Those of a step, those that move a shard, and those of named values only where the run has them."""

    async def scenario(swarm: ScriptedSwarm, services: ExchangeServices) -> None:
        assert not {"push", "pull", "forward"} & swarm.handlers.keys()
        services.start()
        assert {"push", "pull", "forward", "where_is", "learn", "state", "hand_over", "survey"} <= swarm.handlers.keys()
        names = [task.get_name() for task in services._tasks]
        assert names == ["rebalancer", "fences", "trust", "start-comparison"]

    play(scenario)

    async def with_values(_swarm: ScriptedSwarm, services: ExchangeServices) -> None:
        services.start()
        assert services._tasks[-1].get_name() == "check-backups"

    play(with_values, ShardStore(IDS["a"], [(0, 0)] * 2, 0, SUM))


def test_a_service_that_fails_is_reported_and_begins_again() -> None:
    """One fault ends neither the service nor the others."""

    async def scenario(swarm: ScriptedSwarm, services: ExchangeServices) -> None:
        swarm.gone = [IDS["b"], IDS["c"]]
        runs: list[float] = []

        async def failing() -> None:
            runs.append(asyncio.get_running_loop().time())
            if len(runs) == 1:
                raise ValueError("a fault")
            await asyncio.Event().wait()

        services.rebalancer.run = failing  # type: ignore[method-assign]
        services.start()
        await asyncio.sleep(2 * FIRST_PAUSE_S)
        found = [one.fields for one in records_of(services.context) if one.event == "exchange_service_failed"]
        assert found == [{"service": "rebalancer", "error": "ValueError('a fault')"}]
        assert [at - runs[0] for at in runs] == [0.0, FIRST_PAUSE_S]
        assert not any(task.done() for task in services._tasks)

    play(scenario)


def test_nothing_runs_after_the_end() -> None:
    """Every task is cancelled and awaited; a halt ends the requests under way first."""

    async def scenario(_swarm: ScriptedSwarm, services: ExchangeServices) -> None:
        services.start()
        await asyncio.sleep(0.1)
        tasks = list(services._tasks)
        order: list[str] = []
        close = services.context.rpc.close

        async def closed() -> None:
            order.append(f"{sum(task.done() for task in tasks)} ended")
            await close()

        rpc: Any = services.context.rpc
        rpc.close = closed
        await services.halt()
        assert order == ["0 ended"]
        assert all(task.cancelled() for task in tasks)
        assert services._tasks == []

    play(scenario)


def test_the_store_of_a_run_is_empty_and_as_the_manifest_says() -> None:
    """The repair log is as large as the settings allow; without an exchange nothing in it lasts."""
    manifest: Any = SimpleNamespace(bounds=lambda: BOUNDS, layout=SimpleNamespace(parameter_total=PARAMETERS), rule=SUM)
    swarm: Any = ScriptedSwarm(contact("a"))
    for enabled in (True, False):
        settings = ExchangeSettings(log_bytes=5_000_000, log_seconds=40.0, enabled=enabled)
        store = store_of(swarm, manifest, settings)
        assert (store.bounds, store.owned, store.backed) == (BOUNDS, {}, {})
        assert store.rule == SUM
        assert (store.log.limit_bytes, store.log.seconds) == (5_000_000, 40.0 if enabled else 0.0)


def test_services_of_the_parts_share_what_is_not_of_single_shards() -> None:
    """The vector, the trust, the counters and the time-outs stay; genesis, store, claims and requests are new ones."""

    async def scenario(_swarm: ScriptedSwarm, services: ExchangeServices) -> None:
        whole = services.context
        halves = [(low + part * 2, low + part * 2 + 2) for low, _ in BOUNDS for part in range(2)]
        parts = ShardStore(IDS["a"], halves, PARAMETERS, SUM)
        whole.replica.vector[:] = np.arange(16)
        context = divided_context(whole, parts, Divisions(whole.run_genesis, 2))
        assert context.genesis != whole.genesis
        assert context.run_genesis == whole.run_genesis
        assert context.store is parts
        assert context.rpc.timeouts is whole.rpc.timeouts
        assert np.shares_memory(context.replica.vector, whole.replica.vector)
        assert len(context.replica.versions()) == 8
        for name in ("counters", "view", "run", "codec", "environment", "settings"):
            assert getattr(context, name) is getattr(whole, name), name
        for name in ("rpc", "rebalance", "claims", "kept"):
            assert getattr(context, name) is not getattr(whole, name), name

        following = ExchangeServices(context, services)
        for name in ("fences", "trust", "codec_control", "push_client"):
            assert getattr(following, name) is getattr(services, name), name
        for name in ("deltas", "reads", "backup", "directory", "rebalancer", "values", "pull_client"):
            assert getattr(following, name) is not getattr(services, name), name

    play(scenario)
