"""Checks of what relays report: a delta that its owner has not got is found, and nothing is said of an honest relay."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from overlay.transport import TransportError
from tests.harness.builders.stores import IDS, contact, store_of, term
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import GENESIS, ScriptedSwarm, context_of
from training.exchange.aggregation import delivery_checks
from training.exchange.aggregation.delivery_checks import (
    AGAIN_S,
    MAX_WAITING,
    STEPS_UNTIL_PULLED,
    DeliveryChecks,
    Reported,
)
from training.exchange.context import ExchangeContext
from training.exchange.directory import OwnerDirectory
from training.exchange.messages import Push, PushResult
from training.exchange.ownership_messages import ListDeltas, ListedDeltas
from training.shards.applied import Applied, DeltaId

ME, OWNER, RELAY = contact("a"), contact("b"), contact("c")
TERM = term(3, "b")


@pytest.fixture(autouse=True)
def every_answer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All answers are checked, not one in 32."""
    monkeypatch.setattr(delivery_checks, "CHECKED", 1)
    return


class Checked:
    """The checks of a node whose shard 0 has an owner with these steps of it."""

    def __init__(self, *has: int, synchronous: bool = False) -> None:
        self.swarm = ScriptedSwarm(ME, [OWNER, RELAY])
        store = store_of("a")
        store.note_owner(0, TERM, OWNER)
        self.has = Applied()
        for step in has:
            self.has.add(DeltaId(IDS["a"], 1, step))
        self.swarm.answers["list"] = lambda *_: ListedDeltas([(0, self.has.rows())])
        self.context: ExchangeContext = context_of(self.swarm, store, synchronous=synchronous)
        self.lost: list[Reported] = []
        self.checks = DeliveryChecks(self.context, OwnerDirectory(self.context), self.lost.append)

    def report(self, step: int, version: int = 5) -> None:
        """A relay says that the owner has the delta of a step, in this version."""
        push = Push(GENESIS, IDS["a"], 1, step, 0, 1.0, [])
        self.checks.note(RELAY.node_id, push, PushResult(0, "ok", version))

    def pulled(self, version: int, under: Any = TERM) -> None:
        self.context.replica.set_version(0, under, version)

    async def check(self) -> None:
        """Check twice, as if half a minute lay between."""
        for _ in range(2):
            self.checks.begin()
            await asyncio.sleep(AGAIN_S + 1.0)


def test_a_delta_that_the_owner_lists_was_delivered() -> None:
    """It is asked once, about the value that was pulled."""

    async def scenario() -> None:
        found = Checked(1, 2)
        found.report(2)
        found.pulled(7)
        await found.check()
        assert (found.lost, found.checks.waiting) == ([], [])
        assert found.swarm.sent("list", ListDeltas) == [ListDeltas(GENESIS, [(0, *TERM, 7)])]

    run(scenario())


def test_a_delta_that_is_missing_twice_was_not_delivered() -> None:
    """Not after the first look: it may be on the other side of a split."""

    async def scenario() -> None:
        found = Checked(1)
        found.report(2)
        found.pulled(7)
        found.checks.begin()
        await asyncio.sleep(AGAIN_S / 2)
        found.checks.begin()
        assert found.lost == []
        await found.check()
        assert [(one.relay, one.identity.step, one.shard) for one in found.lost] == [(RELAY.node_id, 2, 0)]
        assert found.checks.waiting == []

    run(scenario())


def test_a_delta_that_comes_late_was_delivered() -> None:
    """Missing at the first look, and there at the second."""

    async def scenario() -> None:
        found = Checked(1)
        found.report(2)
        found.pulled(7)
        found.checks.begin()
        await asyncio.sleep(1.0)
        found.has.add(DeltaId(IDS["a"], 1, 2))
        await found.check()
        assert (found.lost, found.checks.waiting) == ([], [])

    run(scenario())


def test_it_waits_until_the_version_is_pulled_but_not_for_ever() -> None:
    """A relay that invents a version is found too."""

    async def scenario() -> None:
        found = Checked(1)
        found.report(2, version=10**6)
        found.pulled(7)
        await found.check()
        assert found.swarm.requests == []
        found.context.run.step = STEPS_UNTIL_PULLED
        await found.check()
        assert len(found.lost) == 1

    run(scenario())


@pytest.mark.parametrize("reason", ["another term", "silent", "not listed", "no owner"])
def test_nothing_follows_where_the_owner_cannot_tell(reason: str) -> None:
    """Another owner since, no answer, a version that it does not list any more, or nobody to ask."""

    async def scenario() -> None:
        found = Checked(1)
        found.report(2)
        found.pulled(7, term(4, "b") if reason == "another term" else TERM)
        if reason == "silent":
            found.swarm.answers["list"] = lambda *_: TransportError("timeout", OWNER.address, "was silent")
        elif reason == "not listed":
            found.swarm.answers["list"] = lambda *_: ListedDeltas([])
        elif reason == "no owner":
            found.swarm.gone.append(OWNER.node_id)
        await found.check()
        assert (found.lost, found.checks.waiting) == ([], [])

    run(scenario())


def test_a_few_wait_and_those_of_synchronous_steps_do_not() -> None:
    """What is held until a step has passed is in no value."""

    async def scenario() -> None:
        found, synchronous = Checked(1), Checked(1, synchronous=True)
        for step in range(1, 2 * MAX_WAITING):
            found.report(step)
            synchronous.report(step)
        assert len(found.checks.waiting) == MAX_WAITING
        assert synchronous.checks.waiting == []

    run(scenario())


def test_one_answer_in_some_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn at random, so that no relay knows which."""

    async def scenario() -> None:
        monkeypatch.setattr(delivery_checks, "CHECKED", 4)
        monkeypatch.setattr(delivery_checks, "MAX_WAITING", 10**6)
        found = Checked(1)
        for step in range(1, 401):
            found.report(step)
        assert 70 <= len(found.checks.waiting) <= 130

    run(scenario())


def test_halting_ends_a_check() -> None:
    """And so does the end without one."""

    async def scenario() -> None:
        found = Checked(1)
        await found.checks.halt()
        found.swarm.request_s = 100.0
        found.report(2)
        found.pulled(7)
        found.checks.begin()
        await asyncio.sleep(0.1)
        await found.checks.halt()
        assert len(found.swarm.requests) == 1
        assert found.lost == []

    run(scenario())
