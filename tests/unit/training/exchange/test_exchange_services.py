"""The exchange of one node: changes of members, its start and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import get_args

import pytest

from p2pnode.overlay.peers import ChangeKind, PeerChange
from p2pnode.overlay.supervision import FIRST_PAUSE_S
from p2pnode.training.exchange.exchange import Exchange
from tests.harness.builders.stores import IDS, contact
from tests.harness.environment.simulated import MemoryDisk
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, records_of
from tests.unit.training.exchange.test_exchange import VALUES, exchange_of

NODE = IDS["b"]


def play(scenario: Callable[[ScriptedSwarm, Exchange], Awaitable[None]], values: int = VALUES) -> None:
    async def main() -> None:
        swarm = ScriptedSwarm(contact("a"), [contact("b"), contact("c")])
        exchange = exchange_of(swarm, MemoryDisk(), values=values)
        try:
            await scenario(swarm, exchange)
        finally:
            await exchange.stop()
            await exchange.stop()

    run(main())


class Calls:
    """Counts the calls of some methods, which do nothing more."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def of(self, name: str) -> Callable[..., None]:
        return lambda *_given: self.made.append(name)


def spied(exchange: Exchange, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What `on_change` may tell others."""
    calls, context = Calls(), exchange
    for owner, name in (
        (type(exchange.reconciler), "on_change"),
        (type(context.store), "on_restart"),
        (type(context.sent), "unconfirm"),
        (type(context.view.score), "forget"),
        (type(context.rpc), "found_dead"),
        (type(context.view), "invalidate"),
        (type(context.rebalance), "wake"),
    ):
        monkeypatch.setattr(owner, name, calls.of(name))
    return calls


CHANGES: dict[ChangeKind, set[str]] = {
    "up": {"forget", "invalidate", "wake"},
    "returned": {"unconfirm", "forget", "invalidate", "wake"},
    "suspect": set(),
    "refuted": set(),
    "dead": {"forget", "found_dead", "invalidate", "wake"},
    "left": {"invalidate", "wake"},
    "restarted": {"on_restart", "unconfirm", "forget", "invalidate", "wake"},
    "moved": {"forget"},
    "eligible": {"invalidate", "wake"},
    "clone": set(),
    "twin": set(),
}


@pytest.mark.parametrize("kind", get_args(ChangeKind))
def test_a_change_of_a_member_reaches_those_whom_it_concerns(kind: ChangeKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reconciler hears of every one. What a restart makes void is dropped, and whoever owns what is looked at again
    when somebody comes, goes, or may own from now on."""

    async def scenario(_swarm: ScriptedSwarm, exchange: Exchange) -> None:
        calls = spied(exchange, monkeypatch)
        exchange._on_change(PeerChange(NODE, kind))
        assert set(calls.made) == {"on_change"} | CHANGES[kind]
        assert len(calls.made) == len(set(calls.made))
        monkeypatch.undo()

    play(scenario)


def test_requests_are_served_from_the_start_on() -> None:
    """Those of a step, those that move a shard, and those of named values only where the run has them."""

    async def scenario(swarm: ScriptedSwarm, exchange: Exchange) -> None:
        assert not {"push", "pull", "forward"} & swarm.handlers.keys()
        await exchange.start()
        assert {
            "push",
            "pull",
            "forward",
            "where_is",
            "learn",
            "state",
            "hand_over",
            "query_replicas",
        } <= swarm.handlers.keys()
        names = [task.get_name() for task in exchange._tasks]
        assert names == ["rebalancer", "fences"]

    play(scenario)

    async def with_values(_swarm: ScriptedSwarm, exchange: Exchange) -> None:
        await exchange.start()
        assert exchange._tasks[-1].get_name() == "check-backups"

    play(with_values, values=0)


def test_a_service_that_fails_is_reported_and_begins_again() -> None:
    """One fault ends neither the service nor the others."""

    async def scenario(swarm: ScriptedSwarm, exchange: Exchange) -> None:
        swarm.gone = [IDS["b"], IDS["c"]]
        runs: list[float] = []

        async def failing() -> None:
            runs.append(asyncio.get_running_loop().time())
            if len(runs) == 1:
                raise ValueError("a fault")
            await asyncio.Event().wait()

        exchange.rebalancer.run = failing  # type: ignore[method-assign]
        await exchange.start()
        await asyncio.sleep(2 * FIRST_PAUSE_S)
        found = [one.fields for one in records_of(exchange) if one.event == "exchange_service_failed"]
        assert found == [{"service": "rebalancer", "error": "ValueError('a fault')"}]
        assert [at - runs[0] for at in runs] == [0.0, FIRST_PAUSE_S]
        assert not any(task.done() for task in exchange._tasks)

    play(scenario)


def test_nothing_runs_after_the_end() -> None:
    """Every task is cancelled and awaited."""

    async def scenario(_swarm: ScriptedSwarm, exchange: Exchange) -> None:
        await exchange.start()
        await asyncio.sleep(0.1)
        tasks = list(exchange._tasks)
        await exchange.stop()
        assert all(task.cancelled() for task in tasks)
        assert exchange._tasks == []

    play(scenario)
