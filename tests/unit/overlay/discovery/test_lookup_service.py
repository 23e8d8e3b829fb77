"""Lookups over the protocol: what is sent, what is counted, which contacts are used, and when a lookup is cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.discovery.lookup_service import DEADLINE_S, RECENT, LookupService
from p2pnode.overlay.ids import distance
from p2pnode.overlay.kademlia.calls import NegativeCache
from p2pnode.overlay.kademlia.messages import FindNode, Nodes, pack_contact, pack_nodes
from p2pnode.overlay.local_node import LocalNode
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.settings import NodeSettings, OverlaySettings, SwarmSettings
from tests.harness.builders.peers import ids
from tests.harness.environment.simulated import VirtualClock
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import played_by, run_by
from tests.harness.stubs.recording_protocol import OWN, RecordedCall, RecordingProtocol

TARGET = b"t" * 20
CONTACTS = [Contact(node_id, Address(f"10.0.1.{number}", 8468)) for number, node_id in enumerate(ids(60), 1)]


class World:
    """A swarm in which each node knows the 20 contacts closest to any target."""

    def __init__(self, contacts: list[Contact]) -> None:
        self.contacts = contacts
        self.recorder = RecordingProtocol()
        self.negative = NegativeCache()
        self.silent: list[bytes] = []
        self.answered: list[RecordedCall] = []
        local = LocalNode(OWN, 1, 1, "tests", Address("10.0.0.1", 8468))
        settings = OverlaySettings(NodeSettings(), SwarmSettings())
        members: Any = SimpleNamespace(negative=self.negative)
        self.service = LookupService(local, self.recorder.protocol, members, settings, VirtualClock())

    def nodes(self, target: bytes) -> Nodes:
        closest = sorted(self.contacts, key=lambda contact: distance(contact.node_id, target))[:20]
        return pack_nodes(closest)

    async def answer(self) -> None:
        """Answer each request a little later; a silent node gives None."""
        while True:
            await asyncio.sleep(0.01)
            calls, self.recorder.calls = self.recorder.calls, []
            for call in calls:
                self.answered.append(call)
                assert isinstance(call.body, FindNode)
                failed = call.contact.node_id in self.silent
                call.on_result(None if failed else self.nodes(call.body.target))


def with_world(story: Callable[[World], Coroutine[Any, Any, None]], contacts: list[Contact], **options: Any) -> None:
    async def body() -> None:
        world = World(contacts, **options)
        network = asyncio.create_task(world.answer(), name="network")
        try:
            await story(world)
        finally:
            network.cancel()
            await asyncio.gather(network, return_exceptions=True)

    run(body())


@played_by(with_world, CONTACTS)
async def test_a_lookup_returns_the_closest_nodes_that_answered_and_its_cost(world: World) -> None:
    """The own node is among them where it belongs; a silent node is not."""
    order = sorted([OWN, *(one.node_id for one in CONTACTS)], key=lambda node_id: distance(node_id, TARGET))
    world.silent.append(next(node_id for node_id in order if node_id != OWN))
    expected = [node_id for node_id in order if node_id not in world.silent][:20]
    found = await world.service.find(TARGET, CONTACTS[:1])

    assert [contact.node_id for contact in found] == expected
    counters = world.recorder.counters
    assert counters["lookups"] == 1
    assert counters["lookup_queries"] == len(world.answered) >= 20
    medians = world.service.medians()
    assert medians is not None
    assert medians.queries == len(world.answered)
    assert medians.ms >= 20


@played_by(with_world, CONTACTS)
async def test_addresses_that_did_not_answer_lately_are_not_asked_again(world: World) -> None:
    """What other nodes report does not bring them back."""
    gone = CONTACTS[1]
    world.negative.add(gone, asyncio.get_running_loop().time())
    beside = gone.node_id[:-1] + bytes([gone.node_id[-1] ^ 1])
    found = await world.service.find(beside, CONTACTS[:2])

    assert gone not in found
    assert gone not in [call.contact for call in world.answered]

    found = await world.service.find(gone.node_id, CONTACTS[:2])
    assert found[0] == gone, "the node that is looked for itself is asked"


@run_by(run)
async def test_a_lookup_that_gets_no_answers_is_cut_off() -> None:
    """It returns what it has at the deadline, and ignores the answers that arrive later."""
    world = World(CONTACTS)
    loop = asyncio.get_running_loop()
    began = loop.time()
    found = await world.service.find(TARGET, CONTACTS[:3])

    assert loop.time() - began == DEADLINE_S
    assert [contact.node_id for contact in found] == [OWN]
    assert world.recorder.counters["lookups_cut_off"] == 1
    sent = len(world.recorder.calls)
    for call in list(world.recorder.calls):
        call.on_result(world.nodes(TARGET))
        call.options["on_slow"]()
    assert len(world.recorder.calls) == sent


@played_by(with_world, CONTACTS)
async def test_one_node_is_asked_for_its_contacts(world: World) -> None:
    """Malformed entries are counted; no answer is an empty list."""
    assert len(await world.service.ask(CONTACTS[0], TARGET)) == 20
    world.silent.append(CONTACTS[0].node_id)
    assert await world.service.ask(CONTACTS[0], TARGET) == []

    waiting = asyncio.create_task(world.service.ask(CONTACTS[1], TARGET), name="ask")
    await asyncio.sleep(0)
    (call,) = world.recorder.calls
    world.recorder.calls.clear()
    call.on_result(Nodes(pack_contact(CONTACTS[2]) + b"cut off", b""))
    assert await waiting == [CONTACTS[2]]
    assert world.recorder.counters["malformed_contacts"] == 1


@played_by(with_world, CONTACTS)
async def test_the_last_lookups_are_remembered_as_they_were(world: World) -> None:
    """`RECENT` of them, the newest last, with the target and the cost of each."""
    targets = [bytes([number]) * 20 for number in range(1, RECENT + 4)]
    costs = []
    for target in targets:
        before, at = len(world.answered), asyncio.get_running_loop().time()
        await world.service.find(target, CONTACTS[:1])
        costs.append((len(world.answered) - before, asyncio.get_running_loop().time() - at))
    recent = world.service.recent
    assert [finished.target for finished in recent] == targets[-RECENT:]
    assert [(finished.queries, finished.seconds) for finished in recent] == costs[-RECENT:]
    assert {finished.rounds for finished in recent} <= {1, 2, 3}
    assert world.service.most_asked(targets[0]) is None, "it is not among the recent ones"
    await world.service.find(targets[-1])
    assert world.service.most_asked(targets[-1]) == costs[-1][0] > 0, "the second had nobody to ask"
