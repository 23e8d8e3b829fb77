"""Requests to the rebalancer: they are collected once, and waking ends its wait."""

from __future__ import annotations

import asyncio

from p2pnode.training.exchange.rebalance_requests import RebalanceRequests
from p2pnode.training.exchange.terms import Fence
from tests.harness.builders.stores import contact, owner_of, term
from tests.harness.environment.virtual_loop import run


def test_a_wake_ends_the_wait_and_counts_once() -> None:
    """Without one the wait lasts its whole time; a wake before the wait counts too."""

    async def scenario() -> None:
        requests, clock = RebalanceRequests(owner_of("a")), asyncio.get_running_loop().time
        began = clock()
        requests.wake()
        await requests.wait(5.0)
        assert clock() == began

        await requests.wait(5.0)
        assert clock() - began == 5.0

    run(scenario())


def test_only_a_higher_term_challenges_an_owner() -> None:
    """Of several fences the highest counts; a shard that is not owned here cannot be challenged. While the shard moves,
    that is resolved first."""

    async def scenario() -> None:
        store = owner_of("a", 3)
        requests, clock = RebalanceRequests(store), asyncio.get_running_loop().time
        requests.challenge([Fence(0, term(3, "a")), Fence(0, term(2, "x")), Fence(1, term(9, "x"))])
        assert store.outranked() == {}

        requests.challenge([Fence(0, term(5, "x")), Fence(0, term(4, "x"))])
        assert store.outranked() == {0: term(5, "x")}
        began = clock()
        await requests.wait(5.0)
        requests.challenge([Fence(0, term(5, "x"))])  # no news
        await requests.wait(5.0)
        assert clock() - began == 5.0
        store.owned[0].moving = True
        assert store.outranked() == {}

    run(scenario())


def test_an_owner_is_challenged_by_a_claim_of_its_own() -> None:
    """Somebody has claimed a term for it that it never had. Nobody need tell it so."""
    store = owner_of("a", 3)
    store.note_owner(0, term(5, "x"), contact("a"))
    assert store.outranked() == {0: term(5, "x")}


def test_orphans_are_collected_once_and_in_order() -> None:
    """A shard that is reported twice is collected once."""

    async def scenario() -> None:
        requests = RebalanceRequests(owner_of("a"))
        for shard in (2, 0, 2):
            requests.take_over(shard)

        assert requests.collect_orphans() == [2, 0]
        assert requests.collect_orphans() == []

    run(scenario())
