"""When a node leaves a member out, and that nothing else makes it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from overlay.transport import RequestRejected
from tests.harness.builders.stores import contact, owner_of, store_of, term
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.stubs.exchange_context import GENESIS, ScriptedSwarm, context_of, records_of
from training.exchange.messages import LocateOwners, LocateOwnersAnswer, encode
from training.exchange.trust import APART_S, LIES, MAX_MEMBERS, WINDOW_S, MemberTrust

LIAR, OTHER = contact("b"), contact("c")


def liar_of(trust: MemberTrust, lies: int = LIES, every_s: float = APART_S) -> None:
    for number in range(lies):
        trust.note(LIAR.node_id, "state", number * every_s)


def test_so_many_lies_leave_a_member_out_and_no_fewer() -> None:
    """The last lie of five says who is left out, since when, and why; the others are trusted."""
    trust = MemberTrust()
    liar_of(trust, LIES - 1)
    assert LIAR.node_id in trust
    found = trust.note(LIAR.node_id, "value", 100.0)

    assert found is not None
    assert (found.node, found.since_s, found.reason, found.lies) == (LIAR.node_id, 100.0, "state", LIES)
    assert LIAR.node_id not in trust
    assert OTHER.node_id in trust
    assert trust.note(LIAR.node_id, "value", 101.0) is None
    assert trust.distrusted() == [found]


def test_lies_of_one_moment_are_one() -> None:
    """A thousand messages of a second are one mistake."""
    trust = MemberTrust()
    liar_of(trust, 1000, APART_S / 1000)
    assert LIAR.node_id in trust


def test_lies_of_long_ago_do_not_count() -> None:
    """A lie every three minutes is never enough."""
    trust = MemberTrust()
    liar_of(trust, 100, WINDOW_S / (LIES - 1) + 1.0)
    assert LIAR.node_id in trust


def test_a_member_is_trusted_again_when_somebody_says_so() -> None:
    """Then it has as many lies again; and nobody is forgiven who was trusted."""
    trust = MemberTrust()
    liar_of(trust)
    assert trust.forgive(LIAR.node_id)
    assert LIAR.node_id in trust
    assert not trust.forgive(LIAR.node_id)
    liar_of(trust, LIES - 1)
    assert LIAR.node_id in trust


def test_invented_members_take_no_memory() -> None:
    """Beyond a limit the one whose last lie is longest ago is forgotten."""
    trust = MemberTrust()
    for number in range(3 * MAX_MEMBERS):
        trust.note(number.to_bytes(20, "big"), "state", 0.0)
    assert len(trust._seen) == MAX_MEMBERS


def run(scenario: Any) -> Any:
    return VirtualLoop().run(scenario)


async def left_out(context: Any) -> None:
    for _ in range(LIES):
        context.lied(LIAR.node_id, "value")
        await asyncio.sleep(APART_S)


def test_a_member_left_out_is_neither_heard_nor_an_owner_nor_a_candidate() -> None:
    """Its requests are refused with the reason, its claims do not count, and what it owns is without an owner. After it
    is forgiven all of that is as before."""

    async def scenario() -> None:
        store = store_of("a")
        swarm = ScriptedSwarm(contact("a"), [LIAR, OTHER])
        context = context_of(swarm, store)
        from training.exchange.directory import OwnerDirectory

        directory = OwnerDirectory(context)

        async def answer(_sender: Any, _message: Any, _stream: Any) -> Any:
            from overlay.transport import Response

            return Response(encode(LocateOwnersAnswer([])))

        context.rpc.register("where_is", LocateOwners, answer)
        question = LocateOwners(GENESIS, [], [])
        await swarm.deliver("where_is", LIAR, question, LocateOwnersAnswer)
        assert not context.view.is_gone(LIAR.node_id)
        await left_out(context)

        with pytest.raises(RequestRejected, match="leaves you out"):
            await swarm.deliver("where_is", LIAR, question, LocateOwnersAnswer)
        await swarm.deliver("where_is", OTHER, question, LocateOwnersAnswer)
        assert context.view.is_gone(LIAR.node_id)
        assert not store.note_owner(0, term(9, "b"), LIAR)
        assert store.note_owner(0, term(8, "c"), OTHER)
        assert [one.node_id for one in await directory.candidates(0)] == [contact("a").node_id, OTHER.node_id]
        (event,) = [one for one in records_of(context) if one.event == "member_distrusted"]
        assert (event.fields["source"], event.fields["reason"]) == (LIAR.node_id.hex(), "value")

        context.view.trust.forgive(LIAR.node_id)
        await swarm.deliver("where_is", LIAR, question, LocateOwnersAnswer)
        assert store.note_owner(0, term(9, "b"), LIAR)

    run(scenario())


def test_what_a_node_hands_on_itself_is_no_lie_of_its_own() -> None:
    """It never leaves itself out."""

    async def scenario() -> None:
        context = context_of(ScriptedSwarm(contact("a")), owner_of("a"))
        for _ in range(10 * LIES):
            context.lied(contact("a").node_id, "repair")
            await asyncio.sleep(APART_S)
        assert contact("a").node_id in context.view.trust

    run(scenario())


def test_a_suspended_member_is_left_out_for_a_time_and_served() -> None:
    """Nobody has to undo it, and nothing of it is written to the disk."""
    trust = MemberTrust()
    trust.suspend(LIAR.node_id, 10.0)
    assert LIAR.node_id not in trust
    assert trust.is_served(LIAR.node_id)
    assert not trust.end_suspensions(9.0)
    assert trust.end_suspensions(10.0)
    assert LIAR.node_id in trust
    assert trust.take_unsaved() is None
    trust.suspend(LIAR.node_id, 20.0)
    assert trust.forgive(LIAR.node_id)
    assert LIAR.node_id in trust
    liar_of(trust)
    assert not trust.is_served(LIAR.node_id)
