"""Limits per member over real sockets and TLS: a member with too many requests waits, while other members are
served. Under asyncio and uvloop."""

from __future__ import annotations

import asyncio

import pytest

from p2pnode.overlay.addresses import id_behind
from p2pnode.overlay.sockets import concurrency
from p2pnode.overlay.transport import Request, Response, TransportError
from tests.harness.runner.stories import run_by
from tests.process.harness.members import Member, ask, until
from tests.process.harness.sockets import run

__all__ = ["run"]

#: Turns in all, and of one member: small, so that few connections suffice.
ALL, OWN = 8, 4


class Busy(Member):
    """Answers `hold` on the test's signal, and everything else at once."""

    def __init__(self) -> None:
        super().__init__()
        self.release = asyncio.Event()
        self.holding: dict[bytes, int] = {}
        self.most_held: dict[bytes, int] = {}

    async def handle(self, incoming: Request) -> Response:
        who = id_behind(incoming.source)
        if incoming.name != "hold":
            return await super().handle(incoming)
        self.holding[who] = self.holding.get(who, 0) + 1
        self.most_held[who] = max(self.holding[who], self.most_held.get(who, 0))
        try:
            await self.release.wait()
        finally:
            self.holding[who] -= 1
        return Response(b"held")


@pytest.fixture
def few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "MAX_CONCURRENT_HANDLERS", ALL)
    monkeypatch.setattr(concurrency, "MAX_HANDLERS_PER_PEER", OWN)


async def outcome(member: Member, busy: Busy) -> str:
    try:
        head, _, _ = await ask(member, busy.home, "hold")
    except TransportError as error:
        return f"{error.kind}: {error.detail}"
    return head.decode()


@pytest.mark.usefixtures("few_turns")
@run_by("run")
async def test_a_member_that_hogs_streams_waits_for_its_own_turns() -> None:
    """Twenty requests that never end, of a member that may have four running. Another member is answered at once.
    Waiting requests run when a turn is free."""
    async with Busy() as busy, Member() as hog, Member() as honest:
        tasks = [asyncio.create_task(outcome(hog, busy)) for _ in range(20)]
        await until(lambda: sum(busy.holding.values()) == OWN, "all turns are taken")
        for _ in range(5):
            await ask(honest, busy.home)  # while the other's do not end
        assert not busy.release.is_set()
        busy.release.set()
        outcomes = await asyncio.gather(*tasks)

        assert busy.most_held == {hog.identity.node_id: OWN}
        assert outcomes == ["held"] * 20


@pytest.mark.usefixtures("few_turns")
@run_by("run")
async def test_a_peer_that_leaves_frees_its_turns() -> None:
    """Streams of a member that are broken off leave nothing behind: its turns are all there again."""
    async with Busy() as busy, Member() as hog:
        for _ in range(3):
            tasks = [asyncio.create_task(outcome(hog, busy)) for _ in range(2 * OWN)]
            await until(lambda: sum(busy.holding.values()) == OWN, "all turns are taken")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: sum(busy.holding.values()) == 0, "all turns are free")
        busy.release.set()
        assert await outcome(hog, busy) == "held"
