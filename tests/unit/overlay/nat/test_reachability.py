"""Dial-back: how many peers must connect, and which reports cause another check."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.kademlia.messages import StreamsFailing
from p2pnode.overlay.local_node import LocalNode
from p2pnode.overlay.nat.reachability import DialBackAnswer, Reachability
from p2pnode.overlay.peers import Contact, PeerChange, PeerTable
from p2pnode.overlay.transport import ReceivedResponse, TransportError
from tests.harness.builders.peers import heartbeat
from tests.harness.environment.simulated import make_environment
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by


class Requests:
    """Dial-back requests: what each peer answers, by its number; None where it cannot be asked."""

    def __init__(self, answers: dict[int, bool | None]) -> None:
        self.answers = answers
        self.asked: list[int] = []
        self.contacts: list[Contact] = []
        self.on_asked: Callable[[], object] = lambda: None

    def register(self, name: str, handler: object, *, waits: bool = False) -> None:
        assert name == "dialback"

    @asynccontextmanager
    async def request(
        self, to: Contact, _name: str, _payload: bytes, *, timeout_s: float, keep: bool
    ) -> AsyncIterator[ReceivedResponse]:
        assert timeout_s > 0
        assert not keep  # each of many that join would keep the streams to those it asked
        number = to.node_id[0]
        self.asked.append(number)
        self.contacts.append(to)
        self.on_asked()
        reached = self.answers[number]
        if reached is None:
            raise TransportError("timeout", to.address, "does not answer")
        answer = DialBackAnswer(reached, "" if reached else "connection refused")
        yield ReceivedResponse(msgspec.msgpack.encode(answer), None)  # type: ignore[arg-type]


def reachability(
    answers: dict[int, bool | None], *, eligible: tuple[int, ...] = (), client_only: bool = False
) -> tuple[Reachability, LocalNode, Requests]:
    local = LocalNode(b"o" * 20, 1, 1, "tests", Address("10.0.0.1", 8468))
    peers, requests = PeerTable(), Requests(answers)
    for number in answers:
        peers.observe(
            heartbeat(bytes([number]) * 20, eligible=number in eligible), Address(f"10.0.1.{number}", 8468), 0.0
        )
    made = Reachability(
        local,
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        requests,  # type: ignore[arg-type]
        peers,
        make_environment(),
        client_only=client_only,
    )
    return made, local, requests


@pytest.mark.parametrize(
    ("answers", "reached"),
    [
        ({1: True}, True),
        ({1: True, 2: True, 3: False}, True),
        ({1: True, 2: False, 3: False}, False),
        ({1: False}, False),
        ({1: True, 2: None, 3: None}, True),
        ({1: None, 2: None}, False),
    ],
)
@run_by(run)
async def test_two_peers_must_connect_or_the_only_one(answers: dict[int, bool | None], reached: bool) -> None:
    """A peer that is not eligible and cannot be asked lowers the number needed."""
    made, local, _ = reachability(answers)

    assert await made.check() is reached
    assert local.reached is local.heartbeat.eligible is reached


@run_by(run)
async def test_eligible_peers_are_asked_first_and_count_even_when_silent() -> None:
    """They can be reached themselves, so one that cannot be asked is a failure, not a NAT."""
    made, local, requests = reachability({1: None, 2: True, 3: True}, eligible=(2, 3))
    assert await made.check()
    assert sorted(requests.asked) == [2, 3]

    made, local, _ = reachability({1: None, 2: True}, eligible=(1, 2))
    assert not await made.check()
    assert not local.reached


@run_by(run)
async def test_a_peer_that_is_gone_while_another_answers_is_asked_at_its_address() -> None:
    """What was known of it must not be read afterwards."""
    made, _, requests = reachability({1: None, 2: None})
    requests.on_asked = lambda: [made._peers.remove(bytes([number]) * 20) for number in (1, 2)]
    assert not await made.check()
    assert sorted(str(contact.address) for contact in requests.contacts) == ["10.0.1.1:8468", "10.0.1.2:8468"]


@run_by(run)
async def test_a_founder_is_reached_without_peers_but_never_a_client() -> None:
    """`client_only` is the user's decision."""
    made, local, _ = reachability({})
    made.assume_reached()
    assert local.reached
    made, local, _ = reachability({}, client_only=True)
    made.assume_reached()
    assert not local.reached
    assert made.reason == "client_only is set"


@run_by(run)
async def test_reports_count_from_two_peers_at_their_own_addresses() -> None:
    """Unknown peers, and known ones from another host, are ignored."""
    made, _, _ = reachability({1: True, 2: True})

    def report(number: int, host: str) -> bool:
        made.on_unreachable_report(StreamsFailing(), heartbeat(bytes([number]) * 20), Address(host, 8468), b"m" * 20)
        return made._wake.is_set()

    assert not report(9, "10.0.1.9")
    assert not report(2, "10.0.1.7")
    assert not report(1, "10.0.1.1")
    assert not report(1, "10.0.1.1")
    assert report(2, "10.0.1.2")


def beside(answers: dict[int, bool | None], **more: Any) -> tuple[Reachability, LocalNode, Requests]:
    """Peers below 10 are of other sites, those above are next to this node."""
    made, local, requests = reachability({}, **more)
    requests.answers = answers
    for number in answers:
        host = f"10.0.1.{number}" if number >= 10 else f"203.0.{number}.1"
        made._peers.observe(
            heartbeat(bytes([number]) * 20, eligible=number in more.get("eligible", ())), Address(host, 8468), 0.0
        )
    return made, local, requests


@pytest.mark.parametrize(
    ("answers", "reached"),
    [
        ({1: False, 10: True, 11: True}, False),
        ({1: True, 10: False, 11: False}, True),
        ({1: None, 10: True, 11: True}, True),
        ({10: True, 11: True}, True),
    ],
)
@run_by(run)
async def test_neighbours_do_not_outvote_the_outside(answers: dict[int, bool | None], reached: bool) -> None:
    """They reach this node where nobody else does. They count where no other has answered."""
    made, local, requests = beside(answers)
    assert await made.check() is reached
    assert local.reached is reached
    assert (10 in requests.asked) is (1 not in answers or answers[1] is None)


@run_by(run)
async def test_neighbours_count_no_more_once_another_site_could_not_connect() -> None:
    """Not when that one has gone, either; when it is back and connects, this node is reached."""
    made, local, requests = beside({1: False, 10: True, 11: True})
    assert not await made.check()
    last = made._peers.remove(bytes([1]) * 20)
    assert last is not None
    assert not await made.check()
    requests.answers[1] = True
    made._peers.observe(heartbeat(bytes([1]) * 20), Address("203.0.1.1", 8468), 0.0)
    assert await made.check()
    assert local.reached


@run_by(run)
async def test_neighbours_do_not_speak_for_an_owner_of_another_site_that_cannot_be_asked() -> None:
    """It can be reached itself, so it may answer the next time."""
    made, local, _ = beside({1: None, 10: True, 11: True}, eligible=(1,))
    assert not await made.check()
    assert not local.reached


@run_by(run)
async def test_a_peer_of_another_site_that_appears_is_asked_at_once() -> None:
    """Where neighbours alone have confirmed that this node is reached, and only there."""
    made, _, _ = beside({10: True, 11: True})
    assert await made.check()
    made._peers.observe(heartbeat(bytes([12]) * 20), Address("10.0.1.12", 8468), 0.0)
    made.on_change(PeerChange(bytes([12]) * 20, "up"))
    assert not made._wake.is_set()
    made._peers.observe(heartbeat(bytes([1]) * 20), Address("203.0.1.1", 8468), 0.0)
    made.on_change(PeerChange(bytes([1]) * 20, "up"))
    assert made._wake.is_set()
