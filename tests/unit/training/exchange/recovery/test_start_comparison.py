"""A node that has just started asks other members, and takes back what most of them contradict."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from overlay.peers import Contact
from overlay.transport import TransportError
from tests.harness.builders.stores import contact, store_of, term, zeros
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of, records_of
from training.exchange.directory import OwnerDirectory
from training.exchange.messages import LocateOwners, LocateOwnersAnswer
from training.exchange.recovery.start_comparison import ENOUGH, StartComparison
from training.exchange.terms import OwnerInfo

ME, LIAR, B, C, D = (contact(name) for name in "axbcd")
FALSE = (1 << 61) - 5


def infos(owner: Contact, number: int) -> list[OwnerInfo]:
    return [OwnerInfo.of(shard, term(number, "b"), owner) for shard in range(4)]


class World:
    """A node that has started through the liar; `known` is what each member says."""

    def __init__(self, others: list[Contact]) -> None:
        self.swarm = ScriptedSwarm(ME, others)
        self.known: dict[bytes, Any] = {one.node_id: infos(B, 7) for one in (B, C, D)}
        self.known[LIAR.node_id] = infos(LIAR, FALSE)
        self.swarm.answers["where_is"] = self._answer
        self.store = store_of("a")
        self.context = context_of(self.swarm, self.store)
        self.comparison = StartComparison(self.context, OwnerDirectory(self.context))

    def _answer(self, to: Contact, _payload: bytes) -> Any:
        found = self.known[to.node_id]
        return found if isinstance(found, Exception) else LocateOwnersAnswer(found)

    def meets(self, *others: Contact) -> None:
        for one in others:
            self.swarm.peers[one.node_id] = self.swarm._peer(one)

    def asked(self) -> set[bytes]:
        return {to.node_id for name, to, _ in self.swarm.requests if name == "where_is"}

    def pulled(self, number: int) -> None:
        for shard in range(4):
            self.context.replica.set_version(shard, term(number, "x"), 9)


@pytest.mark.parametrize("met", [[B, C], [B]])
def test_two_members_that_are_met_later_undo_what_the_first_one_said(met: list[Contact]) -> None:
    """Its terms, and the values that came under them. One alone may be the liar."""

    async def scenario() -> None:
        world = World([LIAR])
        world.comparison.begin(LIAR)
        await world.comparison._directory.learn_all(LIAR)
        world.pulled(FALSE)
        working = asyncio.create_task(world.comparison.run())
        await asyncio.sleep(5.0)
        assert {one.term.number for one in map(world.store.ownership.owner_info, range(4)) if one} == {FALSE}
        world.meets(*met)
        await asyncio.sleep(5.0)
        events = [record.fields for record in records_of(world.context) if record.event == "terms_taken_back"]
        if len(met) == 2:
            assert events == [{"shards": 4, "was": FALSE}]
            assert {one.owner for one in world.store.ownership.known_owners.values()} == {B}
            assert [world.context.replica.pulled_version(shard) for shard in range(4)] == [None] * 4
        else:
            assert events == []
        working.cancel()

    run(scenario())


@pytest.mark.parametrize("knew", [[LIAR], [LIAR, D]])
def test_a_node_that_knew_one_member_pulls_every_shard_anew(knew: list[Contact]) -> None:
    """Once two others have answered: what it was sent under a true version may be false all the same. Its own shards
    stay."""

    async def scenario() -> None:
        world = World(knew)
        world.known[LIAR.node_id] = infos(LIAR, 7)
        world.comparison.begin(LIAR)
        world.pulled(7)
        world.store.own(3, zeros(world.store, 3), term(8, "a"), ME, 0.0, by_handover=False)
        working = asyncio.create_task(world.comparison.run())
        world.meets(B, C)
        await asyncio.sleep(5.0)
        versions = [world.context.replica.version_of(shard)[1] for shard in range(4)]
        assert versions == ([0, 0, 0, 9] if len(knew) == 1 else [9] * 4)
        working.cancel()

    run(scenario())


def test_some_members_are_asked_once_each_and_not_the_first_one() -> None:
    """One that does not answer, or knows no owner, is asked again; after enough answers nobody is."""

    async def scenario() -> None:
        others = [LIAR, B, C, D, Contact(b"e" * 20, D.address)]
        world = World(others)
        world.known[B.node_id] = TransportError("timeout", B.address, "was silent")
        world.known[others[-1].node_id] = infos(B, 7)
        world.known[C.node_id] = []
        world.comparison.begin(LIAR)
        working = asyncio.create_task(world.comparison.run())
        await asyncio.sleep(4.5)
        assert LIAR.node_id not in world.asked()
        assert not working.done()
        world.known[C.node_id] = infos(B, 7)
        await asyncio.sleep(3.0)
        assert working.done()
        answered = [to for name, to, _ in world.swarm.requests if name == "where_is" and to in (D, others[-1])]
        assert len(answered) == len(set(answered)) == ENOUGH - 1
        assert world.swarm.sent("where_is", LocateOwners)[0].shards == []

    run(scenario())


def test_the_vector_is_as_it_was() -> None:
    """Nothing is written to the trainer's memory: the next pull does that."""

    async def scenario() -> None:
        world = World([LIAR])
        world.context.replica.vector[:] = 5.0
        world.pulled(FALSE)
        world.comparison._pull_anew()
        assert np.array_equal(world.context.replica.vector, np.full(16, 5.0, np.float32))

    run(scenario())
