"""A script as the host of the loops of server and worker: what it asks its daemon, and how often."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from p2pnode.training.engines.link import NoNode
from p2pnode.training.engines.server.host import SHOW_S, ScriptHost
from p2pnode.training.engines.values_link import immediate
from p2pnode.training.trainer_link.engine_messages import (
    Called,
    CallNode,
    CallReceived,
    CountStep,
    Done,
    ListMembers,
    MembersFound,
    TaskCounts,
)

ME, OTHER = b"m" * 20, b"o" * 20
LIMIT_S = 10.0


class Link:
    """Answers every question, and keeps them."""

    def __init__(self) -> None:
        self.is_stopping = False
        self.asked: list[Any] = []
        self.answered: list[Any] = []
        self.calls: list[CallReceived] = []

    def ask(self, question: Any) -> Any:
        self.asked.append(question)
        match question:
            case ListMembers(nodes):
                return MembersFound([ME], nodes)
            case CallNode(_, payload):
                return Called(payload[::-1])
        return Done()

    def next_call(self, timeout_s: float) -> CallReceived | None:
        return self.calls.pop(0) if self.calls else None

    def answer(self, answer: Any) -> None:
        self.answered.append(answer)


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


def counts(held: int = 1, done: int = 0) -> TaskCounts:
    return TaskCounts(0, 1, 1, done, held, 0, 0, 0)


def test_a_step_is_announced_once_with_the_time_since_the_one_before(host: Host, link: Link) -> None:
    """The first has no time; one that does not rise is not announced."""
    for step, seconds in ((0, 0.0), (0, 1.0), (1, 2.5), (1, 9.0), (3, 10.0)):
        host.now_s = 100.0 + seconds
        immediate(host.announce(step))

    assert link.asked == [CountStep(0, 0.0), CountStep(1, 2.5), CountStep(3, 7.5)]


def test_tasks_under_way_are_shown_now_and_then_and_their_end_at_once(host: Host, link: Link) -> None:
    """What has not changed is not shown again."""
    immediate(host.show(0, counts(done=0)))
    immediate(host.show(0, counts(done=1)))
    host.now_s += SHOW_S
    immediate(host.show(0, counts(done=1)))
    immediate(host.show(0, counts(held=0, done=2)))
    assert link.asked[-1] == counts(held=0, done=2)
    host.now_s += SHOW_S
    immediate(host.show(0, counts(held=0, done=2)))

    assert [one for one in link.asked if isinstance(one, TaskCounts)] == [
        counts(done=0),
        counts(done=1),
        counts(held=0, done=2),
    ]


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
