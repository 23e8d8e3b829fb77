"""Looking for a way to a member that does not answer: whom it asks, and what comes of it."""

from __future__ import annotations

import asyncio
from typing import Any

from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import TransportError
from p2pnode.training.exchange.directory import RELAYS_ASKED, SEARCH_WITHIN_S, RouteFinder
from p2pnode.training.exchange.messages import Indirect, IndirectAnswer, decode
from p2pnode.training.exchange.peer_score import FIRST_LOOK_S, UNREACHED_S
from tests.harness.builders.stores import contact, owner_of, store_of, term
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import (
    Answer,
    ExchangeContext,
    ScriptedSwarm,
    context_of,
    records_of,
    route_finder_of,
)

ME, B, C, D = contact("a"), contact("b"), contact("c"), contact("d")
REFUSED = TransportError("refused", B.address, "refused the connection")


def finder_of(relays: list[Contact], *, is_direct: bool = False) -> tuple[RouteFinder, ScriptedSwarm, ExchangeContext]:
    """Node b owns shard 1, and requests to it fail. Those of `relays` reach it; `is_direct`: this node does again."""
    swarm = ScriptedSwarm(ME, [B, C, D])
    store = store_of("a")
    store.note_owner(1, term(1, "b"), B)
    context = context_of(swarm, store)

    def answer(to: Contact, payload: bytes) -> Answer:
        if to == B:
            return IndirectAnswer() if is_direct else REFUSED
        assert decode(payload, Indirect).target == B.node_id
        return IndirectAnswer() if to in relays else IndirectAnswer(failure="timeout", detail="did not answer")

    swarm.answers["indirect"] = answer
    context.view.score.failed(B, REFUSED.detail)
    return route_finder_of(context), swarm, context


def asked(swarm: ScriptedSwarm) -> list[Contact]:
    return [to for name, to, _ in swarm.requests if name == "indirect"]


def test_a_member_that_others_reach_is_reached_by_way_of_one() -> None:
    """The member itself is asked too. Its failures count no more, and a word is said."""

    async def scenario() -> None:
        finder, swarm, context = finder_of([D])
        await asyncio.sleep(FIRST_LOOK_S)
        assert finder.due() == [B]
        await finder.look(finder.due())

        assert asked(swarm)[0] == B
        assert set(asked(swarm)[1:]) == {C, D}
        assert context.view.score.relay(B.node_id) == D.node_id
        assert not context.view.score.failed_within(B.node_id, 100.0)
        (record,) = records_of(context)
        assert (record.event, record.fields["reason"]) == ("route_found", REFUSED.detail)
        assert finder.due() == []

    run(scenario())


def test_a_member_that_is_reached_by_way_of_another_is_not_gone() -> None:
    """Whatever the failure detector says. Where the relay fails it is gone again."""

    async def scenario() -> None:
        finder, swarm, context = finder_of([D])
        swarm.gone.append(B.node_id)
        assert context.view.is_gone(B.node_id)
        await finder.look([B])
        assert not context.view.is_gone(B.node_id)
        context.view.score.failed(B, "broke", D.node_id)
        assert context.view.is_gone(B.node_id)

    run(scenario())


def test_a_direct_answer_ends_the_detour() -> None:
    """The member and the relay in use are asked at the same time, and nobody else."""

    async def scenario() -> None:
        finder, swarm, context = finder_of([C, D], is_direct=True)
        context.view.score.looked_for(B.node_id, C.node_id)
        await finder.look([B])

        assert asked(swarm) == [B, C]
        assert not context.view.score.unreached()
        assert [record.event for record in records_of(context)] == ["route_found", "route_direct"]

    run(scenario())


def test_a_member_that_nothing_depends_on_is_only_asked_itself() -> None:
    """It may answer again, and be a candidate."""

    async def scenario() -> None:
        finder, swarm, context = finder_of([D])
        swarm.answers["indirect"] = lambda *_: IndirectAnswer()
        context.view.score.failed(C, "refused")
        await finder.look([C])
        assert asked(swarm) == [C]
        assert list(context.view.score.unreached()) == [B.node_id]

    run(scenario())


def test_ways_to_backups_are_looked_for_as_well() -> None:
    """Deltas wait for them."""

    async def scenario() -> None:
        swarm = ScriptedSwarm(ME, [B, C])
        store = owner_of("a")
        store.owned[0].backup = C
        context = context_of(swarm, store)
        swarm.answers["indirect"] = lambda to, _: IndirectAnswer() if to == B else REFUSED
        context.view.score.failed(C, "refused")
        await route_finder_of(context).look([C])
        assert context.view.score.relay(C.node_id) == B.node_id

    run(scenario())


def test_a_take_over_waits_a_moment_for_those_that_may_reach_the_owner() -> None:
    """Without an answer nothing is held up for longer, and nobody is asked again."""

    async def scenario() -> None:
        for relays, found in (([D], D.node_id), ([], b"")):
            finder, swarm, context = finder_of(relays)
            swarm.request_s = 0.1 if relays else 60.0
            clock, score = context.environment.clock, context.view.score
            score.answered(C.node_id)
            for _ in range(3):
                score.failed(B, "did not answer")
            await asyncio.sleep(UNREACHED_S)
            score.answered(C.node_id)
            assert finder.owners_to_search([1, 2]) == [B]
            began_s = clock.monotonic()
            await finder.look([B], SEARCH_WITHIN_S)
            assert clock.monotonic() - began_s <= SEARCH_WITHIN_S
            assert (set(asked(swarm)), score.relay(B.node_id)) == ({B, C, D}, found)
            assert finder.owners_to_search([1, 2]) == []

    run(scenario())


def test_few_members_are_asked_and_none_that_is_doubtful() -> None:
    """A suspect, one that is not reached itself, and one that nobody can dial pass nothing on."""

    async def scenario() -> None:
        finder, swarm, context = finder_of([])
        others = [Contact(bytes([number]) * 20, D.address) for number in range(1, 10)]
        swarm.peers |= {one.node_id: swarm._peer(one) for one in others}
        swarm.peers[others.pop().node_id].eligible = False
        swarm.suspects.append(D.node_id)
        context.view.score.failed(C, "refused")
        await asyncio.sleep(UNREACHED_S)
        await finder.look([B])

        relays: Any = asked(swarm)[1:]
        assert len(relays) == RELAYS_ASKED
        assert set(relays) <= set(others)
        assert context.view.score.relay(B.node_id) == b""

    run(scenario())
