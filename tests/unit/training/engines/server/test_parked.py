"""Polls that wait: what is told of their reports, and which short reports are not known."""

from __future__ import annotations

from p2pnode.training.engines.server.acceptance import EachAtOnce
from p2pnode.training.engines.server.core import ServerCore
from p2pnode.training.engines.server.messages import Computed, HeldLease, Poll
from p2pnode.training.engines.server.service import ParkedPoll, unknown_reports, whole_reports
from tests.unit.training.engines.server.test_core import A, commit_all, done, give, server


class _Asked:
    sender = A
    payload = b""

    async def answer(self, payload: bytes) -> None: ...


def _waiting() -> tuple[ServerCore, ParkedPoll, Computed]:
    """A server that has an update of A, and A's poll."""
    core = server("asp", EachAtOnce(), [A])
    lease = give(core)[A]
    core.report(done(lease), 1.0)
    computed = Computed(HeldLease(lease.task, lease.attempt, lease.step, []), 0, [(b"sw", b"\x01")])
    poll = Poll(1, core.epoch, "", True, [computed.short()])
    return core, ParkedPoll(_Asked(), poll, [(*computed.name, "waits")], 1.0), computed


def test_an_answer_names_what_is_kept_and_what_counts():
    """An update that waits is kept, and is no news; once committed it counts, and is."""
    core, parked, computed = _waiting()
    assert parked.fates(core, A) == ([(*computed.name, "waits")], [computed.name])
    assert not parked.has_news(core, A)
    commit_all(core)
    assert parked.fates(core, A) == ([(*computed.name, "counted")], [])
    assert parked.has_news(core, A)


def test_a_short_report_is_known_to_the_server_that_has_the_update():
    """Not to one of another epoch, to one that has not taken over yet, and not from another worker."""
    core, parked, computed = _waiting()
    poll = parked.poll
    assert unknown_reports(core, A, poll, is_settled=True) == []
    assert unknown_reports(core, A, poll, is_settled=False) == [computed.name]
    assert unknown_reports(core, b"b", poll, is_settled=True) == [computed.name]
    of_before = Poll(1, core.epoch + 1, "", True, poll.reports)
    assert unknown_reports(core, A, of_before, is_settled=True) == [computed.name]
    assert unknown_reports(core, A, Poll(1, 0, "", True, [computed]), is_settled=False) == []


def test_only_whole_reports_bring_updates():
    """Neither a short one nor one of an error does."""
    _, parked, computed = _waiting()
    failed = Computed(computed.held, 0, failure="it raised")
    assert whole_reports(Poll(1, 1, "", True, [*parked.poll.reports, computed, failed])) == [computed]
