"""Who serves as master, over the real overlay: its record is kept, found and replaced; requests follow it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from p2pnode.overlay.ids import distance
from p2pnode.overlay.overlay import Overlay
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Buffer, Response, TransportError, gathered, in_parts
from p2pnode.training.dispatch.answers import ReportAnswer
from p2pnode.training.dispatch.client import ANSWER_S, KEEPERS, RECORD_S, MasterClient, MasterDirectory, key_of
from p2pnode.training.dispatch.messages import (
    DISPATCH,
    MASTER,
    MAX_MESSAGE_BYTES,
    EndTask,
    MasterRecord,
    ReportsTold,
    TryAgain,
    WhoServes,
    decode_request,
    decode_who,
    encode,
)
from tests.harness.environment.simulated import make_environment
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.swarms.overlay_swarm import OverlayWorld

GENESIS = b"g" * 16
REQUEST = EndTask(b"q", 3, 1, None, 5)
ACCEPTED = ReportsTold([ReportAnswer.ACCEPTED], None)


class World(OverlayWorld):
    """Nodes with their directories."""

    directories: list[MasterDirectory]

    @classmethod
    async def of(cls, count: int) -> World:
        world = cls(1)
        overlays = await world.raise_swarm(count)
        world.directories = [MasterDirectory(overlay, make_environment()) for overlay in overlays]
        await asyncio.sleep(5.0)  # all know each other
        return world

    def contact(self, number: int) -> Contact:
        return Contact(self.nodes[number].node_id, self.nodes[number].address)

    def record(self, number: int, epoch: int = 1, identity: bytes = b"") -> MasterRecord:
        return self.directories[number].own_record(epoch, identity)


@run_by(run)
async def test_a_record_is_known_for_half_a_minute_after_it_was_last_heard() -> None:
    """And no longer where its master is known to be gone."""
    world = await World.of(2)
    directory, record = world.directories[0], world.record(1)
    directory.note(record)
    await asyncio.sleep(RECORD_S - 1.0)
    assert directory.record == record
    directory.note(record)
    await asyncio.sleep(RECORD_S - 0.1)
    assert directory.record == record
    await asyncio.sleep(0.1)
    assert directory.record is None

    directory.note(record)
    await world.kill(1)
    await asyncio.sleep(15.0)
    assert directory.record is None


@run_by(run)
async def test_the_higher_epoch_wins_while_its_record_is_fresh() -> None:
    """Listeners get each record that differs, once; an old epoch counts again after the newer one is forgotten."""
    world = await World.of(3)
    directory = world.directories[0]
    heard: list[MasterRecord] = []
    directory.on_record(heard.append)
    for one in (world.record(1, 4), world.record(1, 4), world.record(2, 3), world.record(2, 5)):
        directory.note(one)
    assert heard == [world.record(1, 4), world.record(2, 5)]

    directory.forget(world.record(1, 4))
    assert directory.record == world.record(2, 5), "that is not the present one"
    directory.forget(world.record(2, 5))
    assert directory.record is None
    directory.note(world.record(1, 4))
    assert heard[-1] == world.record(1, 4)


@run_by(run)
async def test_a_record_is_kept_by_the_eight_nodes_nearest_to_the_key_and_found_there() -> None:
    """The newest counts for those who know none."""
    world = await World.of(14)
    for master, epoch in ((0, 7), (1, 8)):
        own = world.record(master, epoch, b"store")
        await world.directories[master].publish(GENESIS, own)
        others = sorted(
            (number for number in range(14) if number != master),
            key=lambda number: distance(key_of(GENESIS), world.nodes[number].node_id),
        )
        knows = [number for number in others if world.directories[number].record == own]
        assert sorted(knows) == sorted(others[:KEEPERS])
        assert world.directories[master].record == own
    assert await world.directories[others[-1]].find(GENESIS) == world.record(1, 8, b"store")


@run_by(run)
async def test_a_record_is_confirmed_by_the_node_that_it_names() -> None:
    """Not if that serves no more, names another, is silent, or is this node itself."""
    world = await World.of(3)
    directory, named = world.directories[0], world.directories[1]
    directory.note(world.record(1, 2))
    assert await directory.confirmed(GENESIS) is None
    named.note(world.record(1, 2))
    assert await directory.confirmed(GENESIS) == world.record(1, 2)
    named.note(world.record(2, 2))
    assert await directory.confirmed(GENESIS) is None
    await world.kill(1)
    assert await directory.confirmed(GENESIS) is None
    directory.note(world.record(0, 3))
    assert await directory.confirmed(GENESIS) is None


@run_by(run)
async def test_a_node_announces_itself_alone() -> None:
    """Another's record, and what is malformed, is refused."""
    world = await World.of(3)

    async def told(message: bytes) -> bytes:
        async with world.nodes[1].request(world.contact(0), MASTER, message, timeout_s=2.0) as response:
            return response.head

    own = world.record(1, 3, b"id")
    assert decode_who(await told(encode(WhoServes(own)))) == WhoServes(own)
    for message, why in ((encode(WhoServes(world.record(2, 9))), "announces itself"), (b"\xff\x00", "malformed")):
        with pytest.raises(TransportError, match=why):
            await told(message)
    assert world.directories[0].record == own
    assert decode_who(await told(encode(WhoServes(None)))) == WhoServes(own)


# -- requests to the master


def serve(overlay: Overlay, *answers: Any) -> list[Any]:
    """A node that answers requests to the master so, and is silent for "lost"; what it is asked."""
    left, asked = list(answers), []

    async def on_request(_sender: Contact, _: bytes, body: AsyncIterator[Buffer]) -> Response:
        asked.append(decode_request(await gathered(body, MAX_MESSAGE_BYTES)))
        if (answer := left.pop(0)) == "lost":
            await asyncio.sleep(2 * ANSWER_S)
        return Response(b"", in_parts(encode(answer)))

    overlay.register(DISPATCH, on_request)
    return asked


@run_by(run)
async def test_a_request_whose_answer_is_lost_is_sent_again_as_it_was() -> None:
    """Until there is an answer; meanwhile `trouble` says since when and why."""
    world = await World.of(2)
    client = MasterClient(world.nodes[0], world.directories[0], make_environment())
    asked = serve(world.nodes[1], "lost", "lost", ACCEPTED)
    await world.directories[1].publish(GENESIS, world.record(1))
    asking = asyncio.create_task(client.ask(GENESIS, REQUEST, ReportsTold))
    await asyncio.sleep(ANSWER_S + 1.0)
    assert client.trouble is not None
    assert "did not answer" in client.trouble.reason
    assert await asking == ACCEPTED
    assert asked == [REQUEST] * 3
    assert (client.trouble, client.master) == (None, world.nodes[1].node_id)


@run_by(run)
async def test_a_node_that_does_not_serve_names_the_one_that_does() -> None:
    """The request goes there at once; a record with an older epoch is not followed."""
    world = await World.of(3)
    client = MasterClient(world.nodes[0], world.directories[0], make_environment())
    first = serve(world.nodes[1], TryAgain("not now", world.record(2, 3)), TryAgain("no more", world.record(2, 5)))
    second = serve(world.nodes[2], ACCEPTED)
    world.directories[0].note(world.record(1, 4))
    assert await client.ask(GENESIS, REQUEST, ReportsTold) == ACCEPTED
    assert (first, second) == ([REQUEST] * 2, [REQUEST])


@run_by(run)
async def test_a_new_master_ends_the_wait() -> None:
    """Its record wakes a client that waits, whatever its backoff."""
    world = await World.of(2)
    client = MasterClient(world.nodes[0], world.directories[0], make_environment())
    asking = asyncio.create_task(client.ask(GENESIS, REQUEST, ReportsTold))
    await asyncio.sleep(30.0)
    serve(world.nodes[1], ACCEPTED)
    began = asyncio.get_running_loop().time()
    await world.directories[1].publish(GENESIS, world.record(1))
    await asking
    assert asyncio.get_running_loop().time() - began < 0.5
