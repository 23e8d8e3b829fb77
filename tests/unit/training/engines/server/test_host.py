"""A script as the host of the loops of server and worker: what it asks its daemon, and how often."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from p2pnode.training.engines.link import NoNode
from p2pnode.training.engines.server.host import ScriptHost
from p2pnode.training.engines.values_link import immediate
from p2pnode.training.trainer_link.engine_messages import CountStep, Done

ME = b"m" * 20
LIMIT_S = 10.0


class Link:
    """Keeps every question."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def ask(self, question: Any) -> Done:
        self.asked.append(question)
        return Done()


class Host(ScriptHost):
    """On a clock that the test sets."""

    now_s = 100.0

    def clock(self) -> float:
        return self.now_s


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def host(link: Link) -> Host:
    return Host(link, ME, SimpleNamespace())  # type: ignore[arg-type]


def test_a_step_is_announced_once_with_the_time_since_the_one_before(host: Host, link: Link) -> None:
    """The first has no time; one that does not rise is not announced."""
    for step, seconds in ((0, 0.0), (0, 1.0), (1, 2.5), (1, 9.0), (3, 10.0)):
        host.now_s = 100.0 + seconds
        immediate(host.announce(step))

    assert link.asked == [CountStep(0, 0.0), CountStep(1, 2.5), CountStep(3, 7.5)]


def test_work_beside_is_repeated_until_the_block_ends(host: Host) -> None:
    """It has ended when the block has, and after the node has there is no more of it."""
    worked, enough = [0], threading.Event()

    async def work() -> None:
        worked[0] += 1
        if worked[0] == 3:
            enough.set()

    async def gone() -> None:
        worked[0] += 1
        enough.set()
        raise NoNode("the node has ended")

    async def beside(what: Any) -> None:
        async with host.beside(what, 0.001):
            assert enough.wait(LIMIT_S)

    immediate(beside(work))
    after = worked[0]
    assert after >= 3
    assert [thread for thread in threading.enumerate() if thread.name == "p2pnode-alive"] == []
    worked[0] = 0
    enough.clear()
    immediate(beside(gone))
    assert worked[0] == 1
