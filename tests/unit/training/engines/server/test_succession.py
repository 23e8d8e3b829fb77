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
    ServerReplaced,
    encode_record,
)
from p2pnode.training.engines.server.messages import NoServer, Poll, Told
from p2pnode.training.engines.server.options import ServerOptions
from p2pnode.training.engines.server.program import ServerVerbs, UpdatesLost
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


@pytest.mark.parametrize("servers", [[], [MIDDLE], [MIDDLE, HIGH]], ids=["unknown", "alone", "lowest"])
def test_the_lowest_of_the_living_serves(servers: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody else is known."""
    host = Host(servers)

    assert outcome(host, monkeypatch) == 100
    assert host.called == []


def test_one_that_is_not_the_lowest_stands_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks the lowest as a standby, and returns its version when the run is over."""
    host = Host([LOW, MIDDLE])
    host.tells = [told(), messages.encode(Told(1, LOW, version=7, ended="done"))]

    assert outcome(host, monkeypatch) == 7
    assert [(node, poll.is_standby, poll.wants, poll.run) for node, poll in host.called] == [(LOW, True, False, 1)] * 2


def test_a_server_that_serves_is_not_replaced_by_a_lower_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it lives, in this start of the program."""
    serving = ServerRecord(epoch=4, server=HIGH, run=1, version=9)
    host = Host([MIDDLE, HIGH], serving)

    assert outcome(host, monkeypatch) == 9
    assert [node for node, _ in host.called] == [HIGH]


def test_the_lowest_takes_over_from_a_dead_one_with_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """And from one of an earlier start of the program, whether it lives or not."""
    assert outcome(Host([MIDDLE], ServerRecord(epoch=4, server=HIGH, run=1)), monkeypatch) == 104
    assert outcome(Host([MIDDLE, HIGH], ServerRecord(epoch=5, server=HIGH, run=1)), monkeypatch, number=2) == 105
    assert outcome(Host([MIDDLE, HIGH], ServerRecord(epoch=6, server=MIDDLE, run=1)), monkeypatch) == 106


def test_one_that_was_replaced_stands_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the record of the other, and asks that."""
    host = Host([MIDDLE, HIGH])
    host.tells = [told(version=3, ended="done")]
    other = ServerRecord(epoch=1, server=HIGH, run=1)

    async def serves(_record: ServerRecord) -> None:
        await host.store.set(RECORD_KEY, encode_record(other))
        raise ServerReplaced(other)

    assert outcome(host, monkeypatch, serves=serves) == 3
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


def test_a_server_that_is_started_anew_runs_the_program_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of an earlier process says that its run is over, also by an error or after several starts: the values
    go on, and the next run begins."""
    failed = ServerRecord(epoch=6, server=MIDDLE, run=3, version=8, ended="failed", failure=FAILURE, stored=4)
    host = Host([LOW, MIDDLE], failed)
    begun: list[ServerRecord] = []

    async def serves(record: ServerRecord) -> None:
        begun.append(record)

    assert outcome(host, monkeypatch, serves=serves) == 106
    assert begun == [ServerRecord(epoch=6, server=MIDDLE, version=8, stored=4)]
    assert host.over == failed
    assert host.called == []
    with pytest.raises(VerbFailed, match="wrong"):
        outcome(Host([MIDDLE], failed), monkeypatch, number=2)


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


def test_one_that_stood_by_knows_what_the_dead_one_has_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The highest version that the values had; what a server refuses it says of another run."""
    host = Host([LOW, MIDDLE])

    class Dying(list[bytes]):
        def pop(self, index: int = -1) -> bytes:
            host.servers = [LOW, MIDDLE] if len(self) > 2 else [MIDDLE]
            return super().pop(index)

    host.tells = Dying([told(made=5), told(made=4), told(made=9, refused="another run"), b"never"])
    assert outcome(host, monkeypatch) == 100
    assert host.made == 5


def test_a_run_that_lost_updates_ends_with_an_error_at_every_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised by those that stand by, and by those that read the record later."""
    host = Host([LOW, MIDDLE])
    host.tells = [told(version=6, ended="stopped", lost=2)]
    record = ServerRecord(epoch=2, server=HIGH, run=1, version=6, ended="stopped", lost=2)
    for one in (host, Host([MIDDLE], record)):
        with pytest.raises(UpdatesLost, match="2 updates may be missing in its values") as error:
            outcome(one, monkeypatch)
        assert (error.value.count, error.value.version) == (2, 6)


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
