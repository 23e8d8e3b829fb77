"""Looking for a way to an owner that does not answer: whom it asks, and what comes of it."""

from __future__ import annotations

import asyncio
from typing import Any

from overlay.peers import Contact
from overlay.transport import TransportError
from tests.harness.builders.stores import IDS, contact, owner_of, store_of, term
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import Answer, ScriptedSwarm, context_of, records_of
from training.exchange.context import ExchangeContext
from training.exchange.directory import OwnerDirectory
from training.exchange.indirect import DOUBTED_LOOK_S, FIRST_LOOK_S
from training.exchange.messages import Indirect, IndirectAnswer, decode
from training.exchange.recovery.route_finder import RELAYS_ASKED, SEARCH_WITHIN_S, RouteFinder

ME, B, C, D = contact("a"), contact("b"), contact("c"), contact("d")
REFUSED = TransportError("refused", B.address, "refused the connection")


def finder_of(relays: list[Contact], *, is_direct: bool = False) -> tuple[RouteFinder, ScriptedSwarm, ExchangeContext]:
    """Node b owns shard 1, and requests to it fail. Those of `relays` reach it; `is_direct`: this node does again."""
    swarm = ScriptedSwarm(ME, [B, C, D])
    swarm.candidate_list = [B, D, ME]
    store = store_of("a")
    store.note_owner(1, term(1, "b"), B)
    context = context_of(swarm, store)

    def answer(to: Contact, payload: bytes) -> Answer:
        if to == B:
            return IndirectAnswer() if is_direct else REFUSED
        assert decode(payload, Indirect).target == B.node_id
        return IndirectAnswer() if to in relays else IndirectAnswer(failure="timeout", detail="did not answer")

    swarm.answers["indirect"] = answer
    clock = context.environment.clock
    context.view.score.routes.failed(B.node_id, B.address, REFUSED.detail, clock.monotonic())
    return RouteFinder(context, OwnerDirectory(context)), swarm, context


def asked(swarm: ScriptedSwarm) -> list[Contact]:
    return [to for name, to, _ in swarm.requests if name == "indirect"]


def test_the_backup_is_asked_first_and_relays() -> None:
    """Candidates of a shard of the owner come before other members. Its failures count no more, and a word is said."""

    async def scenario() -> None:
        finder, swarm, context = finder_of([C, D])
        context.view.note_failure(B.node_id)
        await asyncio.sleep(FIRST_LOOK_S)
        members = finder.due()
        assert list(members) == [B.node_id]
        await finder.look(members)

        assert asked(swarm) == [B, D, C]
        assert context.view.score.routes.relay(B.node_id) == D.node_id
        assert not context.view.failed_within(B.node_id, 100.0)
        (record,) = records_of(context)
        assert (record.event, record.fields["reason"]) == ("route_found", REFUSED.detail)
        assert finder.due() == {}

    run(scenario())


def test_a_member_that_is_reached_by_way_of_another_is_not_gone() -> None:
    """Whatever the failure detector says. Where the relay fails it is gone again."""

    async def scenario() -> None:
        finder, swarm, context = finder_of([D])
        swarm.gone.append(B.node_id)
        assert context.view.is_gone(B.node_id)
        await finder.look({B.node_id: B})
        assert not context.view.is_gone(B.node_id)
        context.view.score.routes.failed(B.node_id, B.address, "broke", 0.0, D.node_id)
        assert context.view.is_gone(B.node_id)

    run(scenario())


def test_a_direct_answer_ends_the_detour() -> None:
    """The member and the relay are asked at the same time."""

    async def scenario() -> None:
        finder, swarm, context = finder_of([C, D], is_direct=True)
        routes = context.view.score.routes
        routes.found(B.node_id, C.node_id, 0.0)
        await finder.look({B.node_id: B})

        assert asked(swarm) == [B, C]
        assert not routes
        assert [record.event for record in records_of(context)] == ["route_direct"]

    run(scenario())


def test_nobody_looks_for_a_member_that_nothing_depends_on() -> None:
    """Nor, for a while, for one that the failure detector suspects."""

    async def scenario() -> None:
        finder, swarm, context = finder_of([C])
        routes = context.view.score.routes
        routes.failed(C.node_id, C.address, "refused", context.environment.clock.monotonic())
        swarm.suspects.append(B.node_id)
        await asyncio.sleep(FIRST_LOOK_S)
        assert finder.due() == {}
        await asyncio.sleep(DOUBTED_LOOK_S)
        assert list(finder.due()) == [B.node_id]

    run(scenario())


def test_backups_are_looked_for_as_well() -> None:
    """Deltas wait for them."""

    async def scenario() -> None:
        swarm = ScriptedSwarm(ME, [B, C])
        store = owner_of("a")
        store.owned[0].backup = C
        context = context_of(swarm, store)
        context.view.score.routes.failed(C.node_id, C.address, "refused", context.environment.clock.monotonic())
        await asyncio.sleep(FIRST_LOOK_S)
        assert list(RouteFinder(context, OwnerDirectory(context)).due()) == [C.node_id]

    run(scenario())


def test_a_take_over_waits_a_moment_for_those_that_may_reach_the_owner() -> None:
    """The owner itself is not asked; without an answer nothing is held up for longer, and nobody is asked again."""

    async def scenario() -> None:
        for relays, found in (([D], D.node_id), ([], b"")):
            finder, swarm, context = finder_of(relays)
            swarm.request_s = 0.1 if relays else 60.0
            clock = context.environment.clock
            began_s = clock.monotonic()
            await finder.search({B.node_id: B})
            routes = context.view.score.routes
            assert clock.monotonic() - began_s <= SEARCH_WITHIN_S
            assert (asked(swarm), routes.relay(B.node_id)) == ([D, C], found)
            assert routes.was_looked_for(B.node_id, clock.monotonic())

    run(scenario())


def test_few_members_are_asked_and_none_that_is_doubtful() -> None:
    """A suspect, and one that is not reached itself, pass nothing on."""

    async def scenario() -> None:
        finder, swarm, context = finder_of([])
        others = [Contact(bytes([number]) * 20, D.address) for number in range(1, 9)]
        swarm.peers |= {one.node_id: swarm._peer(one) for one in others}
        swarm.suspects.append(D.node_id)
        context.view.score.routes.failed(C.node_id, C.address, "refused", 0.0)
        await finder.look({B.node_id: B})

        relays: Any = asked(swarm)[1:]
        assert len(relays) == RELAYS_ASKED
        assert set(relays) <= set(others)
        assert context.view.score.routes.relay(B.node_id) == b""

    run(scenario())
    assert IDS["b"] == B.node_id
