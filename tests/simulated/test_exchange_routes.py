"""Requests by way of another member, between two that do not reach each other; and whom a node has to do with."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import RequestRejected, TransportError
from p2pnode.training.exchange.messages import (
    Indirect,
    LocateOwners,
    LocateOwnersAnswer,
    Pull,
    PullAnswer,
    Wanted,
    decode,
    encode,
)
from p2pnode.training.exchange.peer_score import IGNORED_S, UNANSWERED, UNREACHED_S
from p2pnode.training.exchange.terms import ZERO_TERM
from tests.harness.runner.stories import played_by
from tests.harness.swarms.exchange_overlay import chunks
from tests.harness.swarms.exchange_story import BOUND_S, ONES, simulate, striking
from tests.harness.swarms.exchange_swarm import GENESIS, World
from tests.harness.swarms.light_network import Links, Member

ASK = LocateOwners([], [])
PULL = Pull(0, "float32", [Wanted(0, ZERO_TERM, 0)])


@played_by(simulate, nodes=5, shards=1)
async def test_two_members_with_a_hole_between_them_exchange_deltas_by_way_of_a_third(world: World) -> None:
    """Requests to the owner do not arrive. Nobody is replaced, each delta is added once, and the detour ends with
    the hole."""
    owning, member = world.owner(), world.bystander()
    term = owning.exchange.store.owned[0].term
    world.cut(member.name, owning.name)
    await member.exchange.push(1, 0, 1.0, ONES.copy())
    assert await member.exchange.flush(30.0) == 0
    assert world.value() == [1.0]
    assert member.exchange.view.score.relay(owning.contact.node_id)
    assert not member.exchange.view.is_gone(owning.contact.node_id)
    assert (await member.exchange.pull(1)).missing == []
    assert (world.owner(), owning.exchange.store.owned[0].term) == (owning, term)
    (found, *_) = world.of("route_found")
    assert found.fields["reason"]

    world.heal()
    await world.until(
        lambda: not member.exchange.view.score.unreached(),
        within_s=90.0,
        what="direct requests",
    )


@played_by(simulate, nodes=5, shards=1)
async def test_a_hole_between_owner_and_backup_costs_no_delta(world: World) -> None:
    """Whichever way it ends, with a relay or with another backup: there is one owner, and a pair with the same bits."""
    member = world.bystander()
    world.cut(world.owner().name, world.backup().name)
    for step in range(1, 6):
        await member.exchange.push(step, step - 1, 1.0, ONES.copy())
    assert await member.exchange.flush(30.0) == 0
    assert world.value() == [5.0]
    await world.until(lambda: world.logged() and world.paired(), within_s=2 * BOUND_S, what="a pair")


async def relayed(relay: Member, sender: Member, target: Member, name: str, message: Any = ASK) -> tuple[bytes, int]:
    """A request of `sender` by way of `relay`, as after a search: the head of the answer, and the size of its body."""
    exchange, node = sender.exchange, target.contact.node_id
    exchange.view.score.failed(target.contact, "did not answer")
    exchange.view.score.looked_for(node, relay.contact.node_id)
    async with exchange.rpc.question(target.contact, name, message, 2.0) as answer:
        return answer.head, sum([len(buffer) async for buffer in answer.body])


@played_by(simulate, nodes=4, shards=1)
async def test_a_relay_passes_a_request_on_as_its_senders_own_and_its_failures_are_those_of_the_receiver(
    world: World,
) -> None:
    """Both bodies arrive. A rejection is an answer of the receiver. A relay that fails is used no more, and one that is
    not reached is named; a request ends with its relay."""
    target = world.owner()
    sender, relay = world.running()[-2:]
    score = sender.exchange.view.score
    seen: list[tuple[str, str, str]] = []
    world.observers.append(lambda source, to, name, _payload: seen.append((source, to, name)))
    head, size = await relayed(relay, sender, target, "pull", PULL)
    assert [one.status for one in decode(head, PullAnswer).results] == ["value"]
    assert size > 16
    assert (sender.name, relay.name, "indirect") in seen
    assert (sender.name, target.name, "pull") not in seen

    with pytest.raises(TransportError) as caught:
        await relayed(relay, sender, target, "no_such")
    assert caught.value.is_not_served
    assert score.relay(target.contact.node_id) == relay.contact.node_id
    waiting = asyncio.ensure_future(relayed(relay, sender, target, "where_is"))
    with striking(world.unanswered, "indirect"):
        await asyncio.sleep(0.5)
        sender.exchange.rpc.found_dead(relay.contact.node_id)
        with pytest.raises(TransportError, match="was found dead"):
            await waiting
    world.cut(relay.name, target.name)
    with pytest.raises(TransportError) as caught:
        await relayed(relay, sender, target, "where_is")
    assert (caught.value.kind, caught.value.address) == ("timeout", target.contact.address)
    assert score.relay(target.contact.node_id) == b""
    world.cut(sender.name, relay.name)
    with pytest.raises(TransportError, match=f"by way of {relay.contact.address}"):
        await relayed(relay, sender, target, "where_is")


@played_by(simulate, nodes=4, shards=1)
async def test_an_answer_that_breaks_on_its_way_through_a_relay_never_looks_complete(world: World) -> None:
    """And the request of nobody, of another swarm, or one that was passed on already is refused: it cannot go in a
    circle."""
    target = world.owner()
    sender, relay = world.running()[-2:]
    world.links = Links(torn=1.0)
    for _ in range(3):
        with pytest.raises(TransportError):
            await relayed(relay, sender, target, "pull", PULL)
    world.links = Links()

    async def refusal(payload: bytes) -> str:
        with pytest.raises(RequestRejected) as caught:
            await relay.overlay.handlers["indirect"](sender.contact, payload, chunks([]))
        return str(caught.value)

    there, here, origin = target.contact, relay.contact, sender.contact
    passed = Indirect(there.node_id, *there.address, "where_is", 1000, b"", b"x" * 20, *origin.address)
    assert "passed on already" in await refusal(encode(passed))
    nobody = Indirect(here.node_id, *here.address, "x", 1, b"", b"", "?")
    for bad in (b"", b"\x93nonsense", encode(nobody)):
        assert "malformed Indirect" in await refusal(bad)
    foreign = b"other" * 4 + encode(ASK)
    inner = Indirect(here.node_id, *here.address, "where_is", 1000, foreign, origin.node_id, *origin.address)
    assert "another swarm" in await refusal(encode(inner))


@played_by(simulate, nodes=4)
async def test_a_node_of_another_swarm_is_asked_nothing_for_a_while(world: World) -> None:
    """Its own requests are rejected each time, with the reason; malformed ones too, but their sender stays a member."""
    sender, to = world.running()[1:3]
    score = to.exchange.view.score

    async def rejection(payload: bytes) -> str:
        with pytest.raises(TransportError) as caught:
            async with sender.overlay.request(to.contact, "where_is", payload, timeout_s=1.0):
                pass
        return caught.value.detail

    assert "malformed LocateOwners" in await rejection(GENESIS + b"\xc1")
    assert not score.is_quarantined(sender.contact.node_id)
    assert "another swarm" in await rejection(b"other" * 4 + encode(ASK))
    assert score.is_quarantined(sender.contact.node_id)
    await asyncio.sleep(IGNORED_S)
    assert not score.is_quarantined(sender.contact.node_id)


@played_by(simulate, nodes=5)
async def test_a_request_goes_to_the_present_address_and_ends_when_its_receiver_is_found_dead(world: World) -> None:
    """A contact may be of an earlier start. What is under way to a dead node fails at once; another request goes on."""
    asker, to, other = world.running()[-3:]
    former = Contact(to.contact.node_id, Address("10.9.9.9", 1))
    answer = await asker.exchange.rpc.ask(former, "where_is", ASK, LocateOwnersAnswer, 1.0)
    assert len(answer.known) == 2

    async def failure(one: Member) -> tuple[str, float]:
        began_s = world.clock.monotonic()
        with striking(world.unanswered, "where_is"), pytest.raises(TransportError) as caught:
            await asker.exchange.rpc.ask(one.contact, "where_is", ASK, LocateOwnersAnswer, 9.0)
        return caught.value.kind, round(world.clock.monotonic() - began_s, 1)

    asyncio.get_running_loop().call_later(0.5, asker.exchange.rpc.found_dead, to.contact.node_id)
    assert await asyncio.gather(failure(to), failure(other)) == [("reset", 0.5), ("timeout", 9.0)]
    assert asker.exchange.rpc.under_way == {}


@played_by(simulate, nodes=4)
async def test_who_answers_nothing_is_given_more_time_next_time_unless_it_is_suspected(world: World) -> None:
    """After a silence half as long again. A suspect, or a dead node, is given no more than the bound."""
    asker, to = world.running()[-2:]

    async def waited() -> float:
        began_s = world.clock.monotonic()
        with pytest.raises(TransportError):
            await asker.exchange.rpc.ask(to.contact, "where_is", ASK, LocateOwnersAnswer, 1.0)
        return round(world.clock.monotonic() - began_s, 2)

    with striking(world.unanswered, "where_is"):
        assert [await waited() for _ in range(3)] == [1.0, 1.5, 2.25]

    async def value_waited() -> float:
        began_s = world.clock.monotonic()
        with pytest.raises(TransportError):
            async with asker.exchange.rpc.request("pull", to.contact, Pull(0, "float32", [])):
                pass
        return round(world.clock.monotonic() - began_s, 2)

    with striking(world.unanswered, "pull"):
        assert [await value_waited() for _ in range(3)] == [3.0, 4.5, 6.75]
    world.pause(to.name)
    is_gone = partial(asker.overlay.is_gone, to.contact.node_id)
    await world.until(is_gone, within_s=6.0, what="it is found dead")
    assert await value_waited() == 4.5


@played_by(simulate, nodes=3, shards=1, replicas=0)
async def test_a_living_member_that_answers_no_request_is_gone_to_the_exchange_and_no_candidate(world: World) -> None:
    """While another one answers. What it answers then brings it back; where all others fail they stay candidates."""
    asker, silent, other = world.running()[:3]
    exchange = asker.exchange

    async def candidates() -> set[str]:
        found = (await exchange.directory.candidates([0]))[0]
        return {one.name for one in world.running() if one.contact in found}

    async def ask_all(times: int, *members: Member) -> None:
        for _ in range(times):
            for member in members:
                await exchange.rpc.try_ask(member.contact, "where_is", ASK, LocateOwnersAnswer)
            await asyncio.sleep(UNREACHED_S / (UNANSWERED - 1))

    with striking(world.unanswered, to=silent):
        await ask_all(UNANSWERED + 1, silent, other)
        assert asker.overlay.is_alive(silent.contact.node_id)
        assert exchange.view.is_gone(silent.contact.node_id)
        assert not exchange.view.is_gone(other.contact.node_id)
        assert await candidates() == {asker.name, other.name}
        with striking(world.unanswered, to=other):
            await ask_all(UNANSWERED + 1, other)
            assert await candidates() == {asker.name, silent.name, other.name}
    await ask_all(1, silent)
    assert not exchange.view.is_gone(silent.contact.node_id)
