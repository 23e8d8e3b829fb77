"""The daemon's side of shared data: between a trainer and the other nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.environment import Environment
from p2pnode.overlay.peers import Contact, PeerChange
from p2pnode.overlay.transport import ReceivedResponse, RequestRejected, TransportError
from p2pnode.training.sharing.member import ADMISSION_S, DataMember
from p2pnode.training.sharing.messages import ShareData
from p2pnode.training.sharing.service import DataService
from p2pnode.training.trainer_link.data_messages import (
    Claim,
    DataGranted,
    DataKnown,
    DataOpened,
    DataShape,
    DataTrained,
    DataWanted,
    PartitionTrained,
)
from tests.harness.environment.simulated import InlineExecutor, ListLog, MemoryDisk, SeededEntropy, VirtualClock
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import played_by

SHAPE = DataShape("samples", 60, 1)
ME, OTHER = b"m" * 20, b"o" * 20


class FakeSwarm:
    """One other node, whose answer a test chooses: a member, "no data", "unknown request" or silence."""

    node_id = ME

    def __init__(self, other: DataMember | str | None = None) -> None:
        self.other = other
        self.handler: Any = None
        self.change: Callable[[PeerChange], None] = lambda _: None
        self.asked = 0

    def members(self) -> list[Any]:
        return [] if self.other is None else [SimpleNamespace(node_id=OTHER)]

    def contact(self, node_id: bytes) -> Contact:
        return Contact(node_id, Address("10.0.0.2", 8468))

    def is_gone(self, node_id: bytes) -> bool:
        return False

    def register(self, name: str, handler: Any, *, waits: bool = False) -> None:
        assert name == "share_data"
        self.handler = handler

    def on_change(self, callback: Callable[[PeerChange], None]) -> None:
        self.change = callback

    @asynccontextmanager
    async def request(
        self, to: Contact, name: str, payload: bytes, body: Any = (), *, timeout_s: float
    ) -> AsyncIterator[ReceivedResponse]:
        self.asked += 1
        if self.other == "silent":
            await asyncio.sleep(timeout_s)
            raise TransportError("timeout", to.address, "was silent")
        if self.other == "unknown request":
            raise TransportError("rejected", to.address, "does not serve it")
        answer = ShareData([])
        if isinstance(self.other, DataMember):
            request = msgspec.msgpack.decode(b"".join(body), type=ShareData)
            self.other.on_message(ME, request, 0.0)
            answer = self.other.answer(request)
        yield ReceivedResponse(b"", body_of(msgspec.msgpack.encode(answer)))


async def body_of(message: bytes) -> AsyncIterator[bytes]:
    yield message


class FakeTrainer:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.handler: Any = None

    def on_data(self, handler: Any) -> None:
        self.handler = handler

    def send_data(self, message: Any) -> None:
        self.sent.append(message)

    def granted(self) -> list[DataGranted]:
        return [message for message in self.sent if isinstance(message, DataGranted)]


class Bench:
    def __init__(self, other: DataMember | str | None = None) -> None:
        self.swarm, self.trainer, self.records = FakeSwarm(other), FakeTrainer(), []
        clock = VirtualClock()
        environment = Environment(
            clock=clock,
            entropy=SeededEntropy("share"),
            disk=MemoryDisk(),
            executor=InlineExecutor(),
            log=ListLog(self.records, "me", clock),
        )
        self.service = DataService(self.swarm, self.trainer, 1, environment)  # type: ignore[arg-type]

    def want(self, number: int, *, begins: bool = True, count: int = 5) -> None:
        self.trainer.handler(DataWanted(number, begins, False, 0, count, False))

    async def granted(self, number: int) -> DataGranted:
        while True:
            for message in self.trainer.granted():
                if message.number == number:
                    return message
            await asyncio.sleep(0.01)


def scene(play: Callable[[Bench], Any], other: DataMember | str | None) -> Bench:
    benches = []

    async def main() -> None:
        bench = Bench(other)
        benches.append(bench)
        await bench.service.start()
        try:
            await play(bench)
        finally:
            await bench.service.stop()

    run(main(), strict=True)
    return benches[0]


@played_by(scene, "unknown request")
async def test_a_node_without_this_request_shares_nothing(bench: Bench) -> None:
    """An older version refuses the request: it is not waited for."""
    bench.trainer.handler(DataOpened(SHAPE, None))
    bench.want(1)
    async with asyncio.timeout(0.5):
        await bench.granted(1)


def test_a_silent_node_delays_the_script_for_a_bounded_time() -> None:
    """Then the script goes on, and the log names the silent node."""

    async def play(bench: Bench) -> None:
        bench.trainer.handler(DataOpened(SHAPE, None))
        bench.want(1)
        async with asyncio.timeout(ADMISSION_S + 1.0):
            await bench.granted(1)

    bench = scene(play, "silent")

    assert [record.event for record in bench.records if record.level == "warning"] == ["data_member_silent"]


@played_by(scene, None)
async def test_what_is_trained_reaches_the_others_and_the_next_checkpoint(bench: Bench) -> None:
    """A request is answered with it, and the trainer is told what to save."""
    bench.trainer.handler(DataOpened(SHAPE, None))
    bench.want(1)
    [claim, *_] = (await bench.granted(1)).claims
    bench.trainer.handler(DataTrained(7, [PartitionTrained(0, claim.partition, 1, True)], -1))

    asking = DataMember(OTHER, 1, SHAPE, 0.0)
    payload = msgspec.msgpack.encode(asking.request())
    response = await bench.swarm.handler(bench.swarm.contact(OTHER), b"", body_of(payload))
    asking.on_message(ME, msgspec.msgpack.decode(b"".join(response.body), type=ShareData), 0.0)
    assert asking.ledger.is_trained((0, claim.partition))
    [known] = [message for message in bench.trainer.sent if isinstance(message, DataKnown)]
    assert known.turn == 7
    assert known.state == bench.service.member.state()


@played_by(scene, None)
async def test_a_restarted_trainer_gets_what_the_old_one_had_begun(bench: Bench) -> None:
    """The script opens its data again: its claims come once more, from where the last report stood."""
    shape = DataShape("samples", 60_000, 1)
    bench.trainer.handler(DataOpened(shape, None))
    bench.want(1, count=2)
    first, second = (await bench.granted(1)).claims
    bench.trainer.handler(DataTrained(1, [PartitionTrained(0, first.partition, 17, False)], -1))

    bench.trainer.handler(DataOpened(shape, None))
    bench.want(2, count=2)
    assert (await bench.granted(2)).claims == [Claim(0, first.partition, 17), second]


@played_by(scene, None)
async def test_a_malformed_request_is_refused(bench: Bench) -> None:
    """Bytes that are no message raise in the sender."""
    with pytest.raises(RequestRejected, match="malformed"):
        await bench.swarm.handler(bench.swarm.contact(OTHER), b"", body_of(b"\xc1"))


@played_by(scene, DataMember(OTHER, 1, SHAPE, 0.0))
async def test_the_service_goes_on_after_a_fault(bench: Bench) -> None:
    """The fault is logged, and a moment later the node asks the others again."""
    members, faults = bench.swarm.members, [KeyError("a bug")]

    def failing() -> list[Any]:
        if faults:
            raise faults.pop()
        return members()

    bench.trainer.handler(DataOpened(SHAPE, None))
    await asyncio.sleep(0.5)
    bench.swarm.members = failing  # type: ignore[method-assign]
    await asyncio.sleep(5.0)
    before = bench.swarm.asked
    await asyncio.sleep(10.0)

    assert not faults
    assert bench.swarm.asked > before
    assert [record.event for record in bench.records if record.level == "error"] == ["service_failed"]


def test_a_death_frees_what_the_dead_had_begun() -> None:
    """The overlay's news reaches the decisions, and a waiting script is answered."""
    other = DataMember(OTHER, 1, SHAPE, 0.0)

    async def play(bench: Bench) -> None:
        bench.trainer.handler(DataOpened(SHAPE, None))
        bench.want(1, count=60)
        first = await bench.granted(1)
        bench.swarm.change(PeerChange(OTHER, "dead"))
        bench.want(2, begins=False, count=60)
        second = await bench.granted(2)
        assert len(first.claims) < 60
        assert len(first.claims) + len(second.claims) == 60

    scene(play, other)


def test_leaving_tells_the_members_and_ends_the_iteration() -> None:
    """Afterwards the node begins nothing: a script that still asks gets nothing."""
    other = DataMember(OTHER, 1, SHAPE, 0.0)

    async def play(bench: Bench) -> None:
        bench.trainer.handler(DataOpened(SHAPE, None))
        bench.want(1)
        await bench.granted(1)
        await bench.service.leave(1.0)
        bench.want(2, begins=False)
        assert (await bench.granted(2)).claims == []
        assert other.view() == [(OTHER, 1)]

    scene(play, other)
