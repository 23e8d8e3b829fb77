"""The port mapper: what a router's answers change in the heartbeat, and when it is asked again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.local_node import LocalNode
from p2pnode.overlay.nat.port_mapping import LEASE_S, MIN_RETRY_DELAY_S, RENEW_SHARE, GatewayFailed, Mapped, PortMapper
from tests.harness.environment.simulated import make_environment
from tests.harness.environment.virtual_loop import run

BOUND = Address("10.0.0.1", 8468)
OUTSIDE = Address("8.8.8.8", 4000)


class Router:
    """Gives these answers one after another, the last one repeatedly."""

    def __init__(self, answers: Iterable[Mapped | GatewayFailed]) -> None:
        self.answers = list(answers)
        self.asked_s: list[float] = []
        self.closed = False

    async def open(self, internal: Address, lease_s: float) -> Mapped:
        assert (internal, lease_s) == (BOUND, LEASE_S)
        self.asked_s.append(asyncio.get_running_loop().time())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, GatewayFailed):
            raise answer
        return answer

    async def close(self) -> None:
        self.closed = True


def play(router: Router, seconds: float) -> tuple[LocalNode, PortMapper, list[Address]]:
    """Run the mapper for some virtual seconds; also the addresses this node had, in order."""

    async def story() -> tuple[LocalNode, PortMapper, list[Address]]:
        local = LocalNode(b"n" * 20, 1, 1, "tests", BOUND)
        had: list[Address] = []
        local.on_change(lambda _change: had.append(local.address))
        mapper = PortMapper(local, router, make_environment())
        task = asyncio.create_task(mapper.run(), name="mapper")
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await mapper.remove()
        return local, mapper, had

    return run(story(), limit_s=100_000.0)


def test_a_mapping_is_announced_once_and_renewed_in_time() -> None:
    """Renewals at half of the lease change nothing; the port is given back at the end."""
    router = Router([Mapped(OUTSIDE, 1000.0)])
    local, mapper, had = play(router, 1600.0)

    assert had == [OUTSIDE]
    assert (local.heartbeat.host, local.heartbeat.port) == (OUTSIDE.host, OUTSIDE.port)
    assert [later - earlier for earlier, later in zip(router.asked_s, router.asked_s[1:], strict=False)] == [
        RENEW_SHARE * 1000.0
    ] * 3
    assert router.closed
    assert mapper.address is None


def test_a_lost_mapping_restores_the_bound_address() -> None:
    """The reason is kept, and the router is asked again after a pause that grows."""
    router = Router([Mapped(OUTSIDE, 100.0), GatewayFailed("is gone")])
    _, mapper, had = play(router, 200.0)
    pauses = [later - earlier for earlier, later in zip(router.asked_s[1:], router.asked_s[2:], strict=False)]

    assert had == [OUTSIDE, BOUND]
    assert mapper.reason == "is gone"
    assert 0.75 * MIN_RETRY_DELAY_S <= pauses[0] <= 1.25 * MIN_RETRY_DELAY_S < pauses[-1]


def test_a_router_behind_another_nat_is_of_no_use() -> None:
    """Its outside address is a private one, which no peer can dial."""
    _, mapper, had = play(Router([Mapped(Address("192.168.7.7", 4000), 0.0)]), 5.0)

    assert had == []
    assert "behind another NAT" in mapper.reason
