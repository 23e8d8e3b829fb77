"""The loop of a worker against scripted servers: what it asks, repeats, and gives up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from p2pnode.training.engines.program import VerbFailed
from p2pnode.training.engines.server import messages
from p2pnode.training.engines.server.core import MAX_KEYS, RECORD_KEY, Failure, ServerRecord, encode_record
from p2pnode.training.engines.server.messages import HeldLease, NoServer, Poll, TaskGiven, Told
from p2pnode.training.engines.server.options import ServerOptions
from p2pnode.training.engines.server.program import ServerVerbs
from p2pnode.training.engines.server.worker import RENEW_S, run_worker
from p2pnode.training.trainer_link.engine_messages import MembersFound, NotAnswered
from p2pnode.training.values.encoding import encode_key, encode_value
from tests.harness.environment.virtual_loop import run
from tests.harness.swarms.memory_values import MemoryValues
from tests.harness.swarms.server_swarm import TableSurroundings

ONE, TWO = b"1" * 20, b"2" * 20
FAILURE = Failure("pull", [encode_key("k")], "node", 3, "ValueError: wrong")


def told(*, server: bytes = ONE, epoch: int = 4, lease_s: float = 10.0, **fields: Any) -> Told:
    return Told(epoch, server, lease_s=lease_s, **fields)


def task(number: int, step: int = 1, value: object = 5) -> TaskGiven:
    held = HeldLease(number, 1, step, [(encode_key("k"), None)])
    return TaskGiven(held, 7, [(encode_key("k"), encode_value("k", value))])


class Host:
    """A worker's node. `answers` are those of the servers in turn: a message, or None for a server that does not
    answer; then the node stops. `tells` answer what is asked while a `push` runs."""

    def __init__(self, *answers: Told | None, servers: Sequence[bytes] = (ONE, TWO)) -> None:
        self.answers = list(answers)
        self.tells: list[Told | None] = []
        self.servers = list(servers)
        self.polls: list[tuple[bytes, Poll]] = []
        self.steps: list[int] = []
        self.store = MemoryValues()
        self.surroundings: Any = TableSurroundings({})
        self.push_s = 0.0
        self.stops = True

    @property
    def is_stopping(self) -> bool:
        return self.stops and not self.answers

    def clock(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def announce(self, step: int) -> None:
        self.steps.append(step)

    async def members(self, nodes: Sequence[bytes] = ()) -> MembersFound:
        return MembersFound(self.servers, [])

    async def call(self, node: bytes, payload: bytes) -> bytes:
        poll = messages.decode_poll(payload)
        self.polls.append((node, poll))
        answers = self.tells if poll.holds is not None else self.answers
        found = answers.pop(0) if answers else None
        if found is None:
            raise NotAnswered("no answer")
        return messages.encode(found)

    async def run(self, work: Callable[[], Any]) -> Any:
        await asyncio.sleep(self.push_s)
        return work()

    @asynccontextmanager
    async def beside(self, work: Callable[[], Awaitable[None]], every_s: float) -> AsyncIterator[None]:
        async def repeat() -> None:
            while True:
                await asyncio.sleep(every_s)
                await work()

        running = asyncio.create_task(repeat())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def doubling() -> ServerVerbs:
    """Its `push` sends twice the value of the task's key."""
    verbs = ServerVerbs()
    verbs.register_push(lambda ctx, params: [(key, 2 * value) for key, value in params])
    return verbs


def work(host: Any, verbs: ServerVerbs | None = None) -> int:
    return run(run_worker(verbs or doubling(), host, ServerOptions(), 3))


def test_a_task_is_computed_from_its_values_and_reported_until_it_counts() -> None:
    """The node shows the completed step meanwhile; what counts is counted once, and is not reported again."""
    host = Host(
        told(task=task(1, step=6)),
        told(outcomes=[(1, 1, "waits")]),
        told(outcomes=[(1, 1, "counted")], task=task(2, step=7, value=8)),
        told(outcomes=[(2, 1, "counted")]),
        told(ended="stopped"),
    )
    assert work(host) == 2
    assert [[one.name for one in poll.reports] for _, poll in host.polls] == [[], [(1, 1)], [(1, 1)], [(2, 1)], []]
    (report,) = host.polls[1][1].reports
    assert (report.version, report.updates) == (7, [(encode_key("k"), encode_value("k", 10))])
    assert host.steps == [5, 6]
    assert {(poll.run, poll.settings, poll.wants) for _, poll in host.polls} == {(3, ServerOptions().text(), True)}


def test_an_update_that_the_server_keeps_is_not_sent_again_to_it() -> None:
    """In another epoch it is: that server has not got it."""
    kept = told(outcomes=[(1, 1, "kept")])
    host = Host(told(task=task(1)), kept, kept, told(epoch=5), told())
    work(host)
    sent = [([one.name for one in poll.reports], poll.kept) for _, poll in host.polls[:5]]
    assert sent == [([], []), ([(1, 1)], []), ([], [(1, 1)]), ([], [(1, 1)]), ([(1, 1)], [])]


def test_an_update_that_a_former_server_keeps_is_sent_whole_to_the_next() -> None:
    """Also where the worker learns of it by a renewal, which is no answer to its reports."""
    host = Host(told(task=task(1)), told(outcomes=[(1, 1, "kept")], task=task(2)), told(epoch=5))
    host.push_s = 1.5
    host.tells = [None, told(epoch=5)]
    work(host)
    first, second = (1, 1), (2, 1)
    sent = [([one.name for one in poll.reports], poll.kept) for _, poll in host.polls[:5]]
    assert sent == [([], []), ([], []), ([first], []), ([], [first]), ([first, second], [])]


def test_a_lease_that_has_ended_by_the_workers_clock_is_told() -> None:
    """Counted from when it asked, for as long as the server said."""
    host = Host(told(task=task(1), lease_s=3.0), told())
    host.push_s = 2.9
    work(host)
    assert host.polls[-2][1].reports[0].held.holds
    host = Host(told(task=task(1), lease_s=3.0), told())
    host.push_s = 3.1
    host.tells = [None, None, None]
    work(host)
    assert not [poll for _, poll in host.polls if poll.holds is None][1].reports[0].held.holds


def test_a_lease_is_renewed_while_push_runs() -> None:
    """Each answer lengthens it from when it was asked, and none shortens it."""
    host = Host(told(task=task(1), lease_s=3.0), told())
    host.push_s = 5.5
    host.tells = [told(lease_s=3.0), told(lease_s=3.0), None, told(refused="no")]
    work(host)
    renewals = [poll for _, poll in host.polls if poll.holds is not None]
    assert len(renewals) == int(5.5 / RENEW_S)
    assert [poll.holds.holds for poll in renewals if poll.holds is not None] == [True] * 4 + [False]
    assert not any(poll.wants for poll in renewals)
    assert not [poll for _, poll in host.polls if poll.holds is None][1].reports[0].held.holds


def test_no_answer_shortens_a_lease() -> None:
    """The server counts from when it heard, which is later."""
    host = Host(told(task=task(1), lease_s=60.0), told())
    host.push_s = 1.5
    host.tells = [told(lease_s=0.1)]
    work(host)
    assert host.polls[2][1].reports[0].held.holds


def test_a_task_that_another_has_taken_is_held_no_more() -> None:
    """No server may take it over from this worker, which reports it all the same."""
    host = Host(told(task=task(1), lease_s=60.0), told())
    host.push_s = 1.5
    host.tells = [told(outcomes=[(1, 1, "superseded")])]
    work(host)
    assert not host.polls[2][1].reports[0].held.holds


def test_what_push_cannot_do_is_the_failure_of_its_task() -> None:
    """It raised, or its update cannot be sent; the worker goes on."""
    raising, strange, large, many = (ServerVerbs() for _ in range(4))
    large.register_push(lambda ctx, params: [(str(part), bytes((1 << 20) - 8)) for part in range(-2, 55)])
    many.register_push(lambda ctx, params: [(str(part), 0) for part in range(MAX_KEYS + 1)])
    raising.register_push(lambda ctx, params: 1 / 0)
    strange.register_push(lambda ctx, params: [("k", object())])
    causes = (
        (raising, "ZeroDivisionError"),
        (strange, "ValueNotEncodable"),
        (large, "the 57 updates of push: they take 59,7"),
        (many, "push returned 65,537 updates, and at most 65,536 are allowed: make smaller tasks"),
    )
    for verbs, cause in causes:
        host = Host(told(task=task(1)), told(outcomes=[(1, 1, "failed")]), told(ended="stopped"))
        assert work(host, verbs) == 0
        assert cause in host.polls[1][1].reports[0].failure
        assert host.polls[1][1].reports[0].updates == []
        assert host.polls[2][1].reports == []


def test_a_server_that_does_not_serve_names_the_one_that_does() -> None:
    """One that names itself does not serve yet, and is asked again; after one that does not answer comes the next."""
    host = Host(told(epoch=0, server=TWO), told(server=TWO, ended="stopped"))
    work(host)
    assert [server for server, _ in host.polls] == [ONE, TWO]
    for first, second in ((told(epoch=0, server=ONE), ONE), (None, TWO)):
        host = Host(first, told(), told(ended="stopped"))
        work(host)
        assert [server for server, _ in host.polls] == [ONE, second, second]


def test_a_run_that_has_ended_without_a_server_is_over() -> None:
    """The servers' record says so; one of an earlier start of the program does not count."""

    async def main(number: int, failure: Failure | None, *answers: Told) -> int:
        host = Host(*answers, servers=[ONE] if answers else [])
        host.stops = False
        record = ServerRecord(epoch=4, server=ONE, run=number, ended="stopped", failure=failure)
        await host.store.set(RECORD_KEY, encode_record(record))
        completed = await run_worker(doubling(), host, ServerOptions(), 3)  # type: ignore[arg-type]
        assert len(host.polls) == len(answers)
        return completed

    assert run(main(3, None)) == 0
    assert run(main(4, None)) == 0
    assert run(main(3, None, told(epoch=0, server=ONE))) == 0, "a server that does not serve any more"
    with pytest.raises(VerbFailed, match="ValueError: wrong"):
        run(main(3, FAILURE))
    with pytest.raises(NoServer):
        run(main(2, None))


def test_a_worker_that_has_just_started_does_not_believe_an_old_record_at_once() -> None:
    """All nodes may have been started anew, and the server that will begin the next run be slower."""

    async def main() -> float:
        host = Host(servers=[])
        host.stops = False
        await host.store.set(RECORD_KEY, encode_record(ServerRecord(epoch=4, server=ONE, run=1, ended="stopped")))
        began_s = host.clock()
        assert await run_worker(doubling(), host, ServerOptions(), 1) == 0  # type: ignore[arg-type]
        return host.clock() - began_s

    assert messages.LATE_S <= run(main()) < messages.LATE_S + 1.0


def test_a_worker_whose_node_stops_takes_leave() -> None:
    """Of the server that it knows, which may be gone as well."""
    host = Host(told())
    work(host)
    assert [(server, poll.leaves) for server, poll in host.polls] == [(ONE, False), (ONE, True)]
    host = Host(None)
    assert work(host) == 0
    assert [poll.leaves for _, poll in host.polls] == [False]
