"""What a node takes from a global server that does not tell the truth, or not in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import TransportError
from p2pnode.training.devices.coordination import AVOID_S, MOST_SHARES, Coordination
from p2pnode.training.devices.global_cycles import LeaseSteps, StepsLeased
from p2pnode.training.swarm import Swarm
from tests.harness.environment.simulated import make_environment
from tests.harness.environment.virtual_loop import run

ME, SERVER = b"m" * 20, b"s" * 20
AT = Address("10.0.0.2", 8468)
TRAINERS, PERIOD = 2, 4

Answer = Callable[[LeaseSteps], StepsLeased | Exception | bytes]


class Host:
    """The trainers of this node: `got` has what they were allowed."""

    period = PERIOD
    leader_loss = None

    def __init__(self) -> None:
        self.got: list[tuple[int, int, bool]] = []

    def leased(self, cycle: int, allowed: int, *, is_closed: bool) -> None:
        self.got.append((cycle, allowed, is_closed))


def asked(answer: Answer, cycles: int = 1) -> tuple[list[tuple[int, int, bool]], list[LeaseSteps]]:
    """What a node is allowed in some cycles by a server that answers so, and what it asked."""
    host, requests = Host(), list[LeaseSteps]()

    @asynccontextmanager
    async def request(_to: Contact, _name: str, payload: bytes, **_: Any) -> AsyncIterator[Any]:
        requests.append(msgspec.msgpack.decode(payload, type=LeaseSteps))
        found = answer(requests[-1])
        if isinstance(found, Exception):
            raise found
        yield SimpleNamespace(head=found if isinstance(found, bytes) else msgspec.msgpack.encode(found))

    async def candidates(_key: bytes) -> list[Contact]:
        return [Contact(SERVER, AT)]

    swarm = SimpleNamespace(node_id=ME, candidates=candidates, request=request)

    async def scenario() -> None:
        coordination = Coordination(
            cast(Swarm, swarm), b"genesis", cast(Any, host), cast(Any, host), make_environment()
        )
        for cycle in range(1, cycles + 1):
            coordination.want(cycle, TRAINERS, 1)
            await asyncio.sleep(0.1)
        await coordination.stop()

    run(scenario())
    return host.got, requests


@pytest.mark.parametrize(
    ("told", "taken"),
    [
        (StepsLeased(1, 3, is_closed=False, total=3), (1, 3, False)),
        (StepsLeased(1, 0, is_closed=True, total=0), (1, TRAINERS, True)),
        (StepsLeased(1, 1 << 31, is_closed=False, total=1 << 31), (1, MOST_SHARES * TRAINERS * PERIOD, True)),
        (StepsLeased(7, 3, is_closed=False, total=3), (1, TRAINERS * PERIOD, True)),
        (b"nonsense", (1, TRAINERS * PERIOD, True)),
        (TransportError("timeout", AT, "is silent"), (1, TRAINERS * PERIOD, True)),
        (KeyError("a bug of this node"), (1, TRAINERS * PERIOD, True)),
    ],
)
def test_a_server_neither_stops_a_node_nor_keeps_it_in_a_cycle(
    told: StepsLeased | Exception | bytes, taken: tuple[int, int, bool]
) -> None:
    """Each trainer has a step of its own in each cycle, none has endlessly many, and without a usable answer the node
    has its own share."""
    got, _ = asked(lambda _: told)
    assert got == [taken]


def test_a_server_that_does_not_answer_is_not_asked_again_at_once() -> None:
    """For some seconds the node goes on without it, so that no cycle waits for its timeout."""
    assert AVOID_S > 1.0
    got, requests = asked(lambda _: TransportError("timeout", AT, "is silent"), cycles=5)
    assert got == [(cycle, TRAINERS * PERIOD, True) for cycle in range(1, 6)]
    assert len(requests) == 1
