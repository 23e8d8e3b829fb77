"""Who serves as master: its record is kept, found and replaced; requests to it are repeated, and follow it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.kademlia.messages import pack_contact
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import ReceivedResponse, RequestRejected, TransportError
from p2pnode.training.dispatch.answers import ReportAnswer
from p2pnode.training.dispatch.client import ASK_S, KEEPERS, RECORD_S, MasterClient, MasterDirectory, key_of
from p2pnode.training.dispatch.messages import (
    DISPATCH,
    MASTER,
    EndTask,
    MasterRecord,
    ReportsTold,
    TryAgain,
    WhoServes,
    decode_request,
    decode_who,
    encode,
)
from tests.harness.environment.simulated import VirtualClock, make_environment
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import played_by

GENESIS = b"g" * 16
ME = Contact(b"m" * 20, Address("10.0.0.1", 8468))
OTHERS = [Contact(bytes([number]) * 20, Address(f"10.0.1.{number}", 8468)) for number in range(1, 12)]
ONE, TWO = OTHERS[:2]
REQUEST = EndTask(b"q", 3, 1, None, 5)
ACCEPTED = ReportsTold([ReportAnswer.ACCEPTED], None)


def record(contact: Contact, epoch: int = 1, identity: bytes = b"") -> MasterRecord:
    return MasterRecord(pack_contact(contact), epoch, identity)


class Swarm:
    """Eleven other nodes near the key; `knows` is what each answers, None a node that does not."""

    node_id, address = ME.node_id, ME.address

    def __init__(self) -> None:
        self.knows: dict[bytes, WhoServes | bytes | None] = {one.node_id: WhoServes(None) for one in OTHERS}
        self.gone: set[bytes] = set()
        self.asked: list[tuple[bytes, WhoServes]] = []
        self.looked_up: list[bytes] = []
        self.handler: Any = None
        #: What a node says to requests to the master, or "lost"; and who was sent which.
        self.answers: dict[bytes, list[Any]] = {}
        self.requests: list[tuple[bytes, Any]] = []

    def register(self, name: str, handler: Any, *, waits: bool = False) -> None:
        assert name == MASTER
        self.handler = handler

    def is_gone(self, node_id: bytes) -> bool:
        return node_id in self.gone

    async def lookup(self, key: bytes) -> list[Contact]:
        self.looked_up.append(key)
        return [OTHERS[0], ME, *OTHERS[1:]]

    @asynccontextmanager
    async def request(
        self, to: Contact, name: str, payload: bytes, body: Any = (), *, timeout_s: float
    ) -> AsyncIterator[Any]:
        if name == DISPATCH:
            self.requests.append((to.node_id, decode_request(b"".join(body))))
            answer = self.answers[to.node_id].pop(0)
            if answer == "lost":
                await asyncio.sleep(timeout_s)
                raise TransportError("timeout", to.address, "was silent")
            yield ReceivedResponse(b"", _body(encode(answer)))
            return
        assert (name, timeout_s) == (MASTER, ASK_S)
        self.asked.append((to.node_id, decode_who(payload)))
        answer = self.knows[to.node_id]
        if answer is None:
            raise TransportError("timeout", to.address, "was silent")
        yield ReceivedResponse(answer if isinstance(answer, bytes) else encode(answer), None)  # type: ignore[arg-type]


async def _body(message: bytes) -> AsyncIterator[bytes]:
    yield message


def with_directory(scenario: Callable[[Swarm, MasterDirectory, VirtualClock], Awaitable[None]]) -> None:
    async def main() -> None:
        swarm, clock = Swarm(), VirtualClock()
        await scenario(swarm, MasterDirectory(swarm, make_environment(clock=clock)), clock)  # type: ignore[arg-type]

    run(main())


@played_by(with_directory)
async def test_a_record_is_known_for_half_a_minute_after_it_was_last_heard(
    swarm: Swarm, directory: MasterDirectory, clock: VirtualClock
) -> None:
    """And no longer where its master is known to be gone."""
    directory.note(record(ONE))
    await asyncio.sleep(RECORD_S - 1.0)
    assert directory.record == record(ONE)
    directory.note(record(ONE))
    await asyncio.sleep(RECORD_S - 0.1)
    assert directory.record == record(ONE)
    await asyncio.sleep(0.1)
    assert directory.record is None

    directory.note(record(ONE))
    swarm.gone.add(ONE.node_id)
    assert directory.record is None


@played_by(with_directory)
async def test_the_higher_epoch_wins_while_its_record_is_fresh(
    _: Swarm, directory: MasterDirectory, __: VirtualClock
) -> None:
    """Listeners get each record that differs, once; an old epoch counts again after the newer one is forgotten."""
    heard: list[MasterRecord] = []
    directory.on_record(heard.append)
    for one in (record(ONE, 4), record(ONE, 4), record(TWO, 3), record(TWO, 5)):
        directory.note(one)
    assert heard == [record(ONE, 4), record(TWO, 5)]

    directory.forget(record(ONE, 4))
    assert directory.record == record(TWO, 5), "that is not the present one"
    directory.forget(record(TWO, 5))
    assert directory.record is None
    directory.note(record(ONE, 4))
    assert heard[-1] == record(ONE, 4)


@played_by(with_directory)
async def test_a_record_is_sent_to_the_eight_nodes_nearest_to_the_key(
    swarm: Swarm, directory: MasterDirectory, _: VirtualClock
) -> None:
    """This node is none of them, though it has the record; some do not answer."""
    swarm.knows[ONE.node_id] = None
    swarm.knows[TWO.node_id] = b"\xff"
    own = directory.own_record(7, b"store")
    assert own == record(ME, 7, b"store")
    await directory.publish(GENESIS, own)
    assert swarm.asked == [(one.node_id, WhoServes(own)) for one in OTHERS[:KEEPERS]]
    assert swarm.looked_up == [key_of(GENESIS)]
    assert directory.record == own


@played_by(with_directory)
async def test_who_does_not_know_asks_the_keepers_and_takes_the_newest(
    swarm: Swarm, directory: MasterDirectory, _: VirtualClock
) -> None:
    """Not one whose master is gone; who knows asks nobody."""
    swarm.gone.add(OTHERS[5].node_id)
    for keeper, known in ((OTHERS[0], record(ONE, 2)), (OTHERS[1], record(TWO, 3)), (OTHERS[2], record(ONE, 1))):
        swarm.knows[keeper.node_id] = WhoServes(known)
    swarm.knows[OTHERS[3].node_id] = WhoServes(record(OTHERS[5], 9))
    swarm.knows[OTHERS[4].node_id] = None
    assert await directory.find(GENESIS) == record(TWO, 3)
    assert len(swarm.asked) == KEEPERS
    assert await directory.find(GENESIS) == record(TWO, 3)
    assert len(swarm.asked) == KEEPERS


@played_by(with_directory)
async def test_a_record_is_confirmed_by_the_node_that_it_names(
    swarm: Swarm, directory: MasterDirectory, _: VirtualClock
) -> None:
    """Not if that is silent, serves no more, names another, or is this node itself."""
    directory.note(record(ONE, 2))
    for answer, is_confirmed in (
        (None, False),
        (WhoServes(None), False),
        (WhoServes(record(TWO, 2)), False),
        (WhoServes(record(ONE, 2)), True),
    ):
        swarm.knows[ONE.node_id] = answer
        swarm.asked.clear()
        assert await directory.confirmed(GENESIS) == (record(ONE, 2) if is_confirmed else None)
        assert swarm.asked == [(ONE.node_id, WhoServes(None))]
    directory.note(record(ME, 3))
    assert await directory.confirmed(GENESIS) is None


@played_by(with_directory)
async def test_a_node_announces_itself_alone(swarm: Swarm, directory: MasterDirectory, _: VirtualClock) -> None:
    """Its record is kept under the address that it was heard from; another's, and what is malformed, is refused."""
    moved = Contact(ONE.node_id, Address("192.0.2.7", 9000))
    response = await swarm.handler(moved, encode(WhoServes(record(ONE, 3, b"id"))), None)
    assert directory.record == record(moved, 3, b"id")
    assert decode_who(response.head) == WhoServes(record(moved, 3, b"id"))
    with pytest.raises(RequestRejected, match="announces itself"):
        await swarm.handler(TWO, encode(WhoServes(record(ONE, 9))), None)
    with pytest.raises(RequestRejected, match="malformed WhoServes"):
        await swarm.handler(TWO, b"\xff\x00", None)
    assert directory.record == record(moved, 3, b"id")
    assert decode_who((await swarm.handler(TWO, encode(WhoServes(None)), None)).head) == WhoServes(
        record(moved, 3, b"id")
    )


# -- requests to the master


def with_client(scenario: Callable[[Swarm, MasterClient, MasterDirectory], Awaitable[None]]) -> None:
    async def main() -> None:
        swarm, environment = Swarm(), make_environment()
        directory = MasterDirectory(swarm, environment)  # type: ignore[arg-type]
        await scenario(swarm, MasterClient(swarm, directory, environment), directory)  # type: ignore[arg-type]

    run(main())


@played_by(with_client)
async def test_a_request_whose_answer_is_lost_is_sent_again_as_it_was(
    swarm: Swarm, client: MasterClient, _: MasterDirectory
) -> None:
    """Until there is an answer; meanwhile `trouble` says since when and why."""
    swarm.knows[TWO.node_id] = WhoServes(record(ONE, 1))
    swarm.answers[ONE.node_id] = ["lost", "lost", ACCEPTED]
    asking = asyncio.create_task(client.ask(GENESIS, REQUEST, ReportsTold))
    await asyncio.sleep(6.0)
    assert client.trouble is not None
    assert "was silent" in client.trouble.reason
    assert await asking == ACCEPTED
    assert swarm.requests == [(ONE.node_id, REQUEST)] * 3
    assert (client.trouble, client.master) == (None, ONE.node_id)


@played_by(with_client)
async def test_a_node_that_does_not_serve_names_the_one_that_does(
    swarm: Swarm, client: MasterClient, _: MasterDirectory
) -> None:
    """The request goes there at once; a record with an older epoch is not followed."""
    swarm.knows[ONE.node_id] = WhoServes(record(ONE, 4))
    swarm.answers[ONE.node_id] = [TryAgain("not now", record(TWO, 3)), TryAgain("no more", record(TWO, 5))]
    swarm.answers[TWO.node_id] = [ACCEPTED]
    assert await client.ask(GENESIS, REQUEST, ReportsTold) == ACCEPTED
    assert [node for node, _ in swarm.requests] == [one.node_id for one in (ONE, ONE, TWO)]


@played_by(with_client)
async def test_a_new_master_ends_the_wait(swarm: Swarm, client: MasterClient, directory: MasterDirectory) -> None:
    """Its record wakes a client that waits, whatever its backoff."""
    asking = asyncio.create_task(client.ask(GENESIS, REQUEST, ReportsTold))
    await asyncio.sleep(30.0)
    swarm.answers[TWO.node_id] = [ACCEPTED]
    began = asyncio.get_running_loop().time()
    directory.note(record(TWO, 1))
    await asking
    assert asyncio.get_running_loop().time() - began < 0.1
