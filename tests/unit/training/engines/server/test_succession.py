"""Which server serves: the lowest, unless another one does; the next one when that is dead, and how a run ends."""

from __future__ import annotations

from typing import Any

import pytest

from p2pnode.training.engines.program import VerbFailed
from p2pnode.training.engines.server import messages, succession
from p2pnode.training.engines.server.core import (
    RECORD_KEY,
    Failure,
    ServerRecord,
    encode_record,
)
from p2pnode.training.engines.server.messages import NoServer, Poll, Told
from p2pnode.training.engines.server.options import ServerOptions
from p2pnode.training.engines.server.program import ServerVerbs
from p2pnode.training.trainer_link.engine_messages import MembersFound, NotAnswered
from tests.harness.environment.virtual_loop import run
from tests.harness.swarms.memory_values import MemoryValues

LOW, MIDDLE, HIGH = b"a" * 20, b"b" * 20, b"c" * 20
FAILURE = Failure("pull", [b"sweights"], "node", 3, "ValueError: wrong")


class Asked:
    def __init__(self) -> None:
        self.sender = b"w" * 20
        self.payload = b"anything"
        self.answers: list[Told] = []

    async def answer(self, payload: bytes) -> None:
        self.answers.append(messages.decode_told(payload))


class Host:
    """A node of a server, on a clock that passes while it receives. `tells` are the answers of the one that serves; the
    node stops when there are no more."""

    def __init__(self, servers: list[bytes], record: ServerRecord | None = None) -> None:
        self.node_id = MIDDLE
        self.servers = servers
        self.store = MemoryValues()
        self.record = record
        self.tells: list[bytes | Exception] = []
        self.called: list[tuple[bytes, Poll]] = []
        self.asked: list[Asked] = []
        self.is_stopping = False
        self.now_s = 0.0
        #: What the server of this node begins with.
        self.made = 0
        self.over: ServerRecord | None = None

    def clock(self) -> float:
        return self.now_s

    async def members(self, nodes: Any = ()) -> MembersFound:
        return MembersFound(self.servers, [])

    async def receive(self, timeout_s: float) -> Asked | None:
        self.now_s += timeout_s / 2 if self.asked else timeout_s
        return self.asked.pop(0) if self.asked else None

    async def call(self, node: bytes, payload: bytes) -> bytes:
        self.called.append((node, messages.decode_poll(payload)))
        found = self.tells.pop(0) if self.tells else NotAnswered("none")
        self.is_stopping = not self.tells
        if isinstance(found, Exception):
            raise found
        return found


def outcome(host: Host, monkeypatch: pytest.MonkeyPatch, *, number: int = 1, serves: Any = None) -> int | list[Any]:
    """What `run_server` returns. A server that serves returns 100 plus the epoch of the record that it begins with."""

    class Serving:
        def __init__(
            self, _verbs: Any, _host: Any, _options: Any, record: ServerRecord, _run: int, made: int, over: Any
        ) -> None:
            self.record = record
            host.made, host.over = made, over

        async def run(self) -> int:
            if serves is not None:
                await serves(self.record)
            return 100 + self.record.epoch

    monkeypatch.setattr(succession, "Serving", Serving)

    async def main() -> int:
        if host.record is not None:
            await host.store.set(RECORD_KEY, encode_record(host.record))
        return await succession.run_server(ServerVerbs(), host, ServerOptions(), number)  # type: ignore[arg-type]

    return run(main())


def told(**fields: Any) -> bytes:
    return messages.encode(Told(epoch=1, server=b"", **fields))


def test_a_server_that_serves_is_not_replaced_by_a_lower_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it lives, in this start of the program."""
    serving = ServerRecord(epoch=4, server=HIGH, run=1, version=9)
    host = Host([MIDDLE, HIGH], serving)

    assert outcome(host, monkeypatch) == 9
    assert [node for node, _ in host.called] == [HIGH]


def test_a_run_that_is_over_is_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version is returned, its error raised; a later start of the program serves."""
    over = ServerRecord(epoch=2, server=HIGH, run=2, version=8, ended="done")
    assert outcome(Host([MIDDLE], over), monkeypatch, number=2) == 8
    assert outcome(Host([MIDDLE], over), monkeypatch, number=1) == 8
    assert outcome(Host([MIDDLE], over), monkeypatch, number=3) == 102

    failed = ServerRecord(epoch=2, server=HIGH, run=1, ended="failed", failure=FAILURE)
    with pytest.raises(VerbFailed, match="wrong"):
        outcome(Host([MIDDLE], failed), monkeypatch)


def test_a_server_that_lives_may_begin_anew_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has just started waits for the one that has ended the last run, which may have started anew too;
    then it takes the run for over."""
    over = ServerRecord(epoch=2, server=HIGH, run=1, version=8, ended="stopped")
    host = Host([MIDDLE, HIGH], over)
    host.tells = [NotAnswered("none"), told(version=3, ended="stopped"), b""]
    assert outcome(host, monkeypatch) == 3

    silent = Host([MIDDLE, HIGH], over)
    silent.tells = [NotAnswered("none")] * 1000
    assert outcome(silent, monkeypatch) == 8
    assert messages.LATE_S <= silent.now_s < messages.LATE_S + 2.0


def test_an_error_of_the_one_that_serves_is_raised_by_those_that_stand_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the function, the key and the node of the error."""
    host = Host([LOW, MIDDLE])
    host.tells = [told(ended="failed", failure=FAILURE)]
    with pytest.raises(VerbFailed, match=r"pull.*'weights'.*wrong"):
        outcome(host, monkeypatch)


def test_a_later_start_that_is_under_way_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both numbers are in it."""
    with pytest.raises(NoServer, match="start number 3 of the program is under way, and this is number 2 here"):
        outcome(Host([MIDDLE], ServerRecord(epoch=1, server=HIGH, run=3)), monkeypatch, number=2)


@pytest.mark.parametrize("answer", [NotAnswered("gone"), b"\xff"], ids=["none", "no message"])
def test_who_gets_no_answer_asks_again(answer: bytes | Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next look at the members decides who is asked; a node that leaves returns the version of the record."""
    host = Host([LOW, MIDDLE], ServerRecord(epoch=1, server=LOW, run=1, version=5))
    host.tells = [answer, answer]

    assert outcome(host, monkeypatch) == 5
    assert len(host.called) == 2


def test_those_that_ask_a_standby_are_sent_to_the_one_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one of them, while it waits to ask itself."""
    host = Host([LOW, MIDDLE])
    first, second = Asked(), Asked()
    host.asked = [first, second]
    outcome(host, monkeypatch)

    assert first.answers == second.answers == [Told(epoch=0, server=LOW)]
    assert host.now_s == pytest.approx(succession.MEMBERS_S)
