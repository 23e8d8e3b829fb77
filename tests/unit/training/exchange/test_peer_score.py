"""Whom a node does without for a while, although they live, and for how long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from overlay.addresses import Address
from overlay.transport import TransportError
from tests.harness.builders.stores import IDS, contact, owner_of, store_of
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.stubs.exchange_context import GENESIS, ScriptedSwarm, context_of
from training.exchange.directory import OwnerDirectory
from training.exchange.messages import LocateOwners, LocateOwnersAnswer
from training.exchange.ownership_messages import SurveyAnswer
from training.exchange.peer_score import (
    APART_S,
    ASK_S,
    FIRST_S,
    LIMITS,
    LONGEST_S,
    MAX_MEMBERS,
    SILENT_S,
    UNANSWERED,
    PeerScore,
    Reason,
)
from training.exchange.recovery.failover import Failover

B, C = IDS["b"], IDS["c"]


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return self.now_s


class Scored:
    """A score, and what is done to it at its clock's time."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.score = PeerScore(self.clock)

    def silence(self, every_s: float = SILENT_S / 2, times: int = UNANSWERED) -> None:
        """B leaves so many requests unanswered."""
        for _ in range(times):
            self.score.unanswered(B)
            self.clock.now_s += every_s

    def note(self, reason: Reason, times: int | None = None, apart_s: float = APART_S) -> None:
        """B does this so often; None: as often as is enough."""
        what = {"refuses": self.score.refused, "restarts": self.score.returned, "nonsense": self.score.nonsense}[reason]
        for _ in range(LIMITS[reason][0] if times is None else times):
            what(B)
            self.clock.now_s += apart_s


def test_a_member_that_answers_nothing_while_others_do_is_silent_for_a_minute() -> None:
    """It is told once, with how long it lasts; then it is tried again."""
    one = Scored()
    score = one.score
    score.answered(C)
    one.silence()
    assert score.is_silent(B)
    assert not score.is_silent(C)
    assert not score.is_candidate(B)
    assert not score.is_ignored(B)
    assert score.take_news() == [(B, "silent", FIRST_S)]
    assert score.take_news() == []
    one.clock.now_s += FIRST_S
    assert not score.is_silent(B)
    assert score.is_candidate(B)


def test_a_node_that_nobody_answers_leaves_nobody_out() -> None:
    """Then it is its own line that fails; what others answered before does not count."""
    one = Scored()
    one.score.answered(C)
    one.clock.now_s += 0.1
    one.silence(times=20)
    assert not one.score.is_silent(B)


@pytest.mark.parametrize(("every_s", "times"), [(SILENT_S, UNANSWERED - 1), (SILENT_S / 10, UNANSWERED)])
def test_a_few_lost_answers_or_a_short_silence_are_none(every_s: float, times: int) -> None:
    """Both the number of requests and the time must be long enough."""
    one = Scored()
    one.score.answered(C)
    one.silence(every_s, times)
    assert not one.score.is_silent(B)


def test_an_answer_ends_a_silence() -> None:
    """Whoever answers again is not gone, and its next silence begins anew."""
    one = Scored()
    one.score.answered(C)
    one.silence()
    one.score.answered(B)
    assert not one.score.is_silent(B)
    one.score.unanswered(B)
    assert not one.score.is_silent(B)


def test_a_silent_member_is_asked_again_until_it_answers() -> None:
    """Every `ASK_S`, and one that is not silent never: after a line of one direction has healed nobody else sends it
    anything."""
    one = Scored()
    one.score.answered(C)
    one.silence()
    assert one.score.to_ask() == [B]
    one.clock.now_s += ASK_S / 2
    assert one.score.to_ask() == []
    one.clock.now_s += ASK_S / 2
    assert one.score.to_ask() == [B]
    one.score.answered(B)
    one.clock.now_s += ASK_S
    assert one.score.to_ask() == []


@pytest.mark.parametrize("reason", LIMITS)
def test_so_many_faults_have_a_member_quarantined_and_no_fewer(reason: Reason) -> None:
    """Those of one moment count once, and those of long ago not at all. Only who sends nonsense is ignored as well."""
    enough, window_s = LIMITS[reason]
    one = Scored()
    one.note(reason, 100, apart_s=0.0)
    one.clock.now_s += window_s
    one.note(reason, 3 * enough, apart_s=window_s / (enough - 1))
    one.clock.now_s += window_s
    one.note(reason, enough - 1)
    assert one.score.is_candidate(B)
    assert one.score.take_news() == one.score.quarantined() == []
    one.note(reason, 1, apart_s=0.0)
    assert not one.score.is_candidate(B)
    assert one.score.is_ignored(B) is (reason == "nonsense")
    assert not one.score.is_silent(B)
    assert one.score.take_news() == one.score.quarantined() == [(B, reason, FIRST_S)]
    one.clock.now_s += FIRST_S
    assert one.score.is_candidate(B)
    assert not one.score.is_ignored(B)
    assert one.score.quarantined() == []


def test_each_time_is_longer_up_to_a_limit() -> None:
    """Who fails again whenever it is tried is tried more rarely. After a long time without a fault it begins anew."""
    one, seconds = Scored(), []
    for _ in range(6):
        one.note("nonsense")
        ((_, _, lasts_s),) = one.score.take_news()
        seconds.append(lasts_s)
        one.clock.now_s += lasts_s
    assert seconds == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S, LONGEST_S, LONGEST_S]
    one.clock.now_s += LONGEST_S
    one.note("nonsense")
    assert one.score.take_news() == [(B, "nonsense", FIRST_S)]


def test_a_quarantined_member_that_sends_nonsense_is_ignored_too() -> None:
    """More of the same changes nothing."""
    one = Scored()
    one.note("refuses")
    one.note("refuses")
    one.note("nonsense")
    one.note("nonsense")
    assert one.score.is_ignored(B)
    assert [reason for _, reason, _ in one.score.take_news()] == ["refuses", "nonsense"]


def test_a_foreign_node_is_ignored_longer_each_time_it_is_met() -> None:
    """While it is ignored more of its requests change nothing."""
    one = Scored()
    for _ in range(2):
        one.score.foreign(B)
    assert one.score.is_ignored(B)
    one.clock.now_s += FIRST_S
    assert not one.score.is_ignored(B)
    one.score.foreign(B)
    assert [seconds for _, _, seconds in one.score.take_news()] == [FIRST_S, 2 * FIRST_S]


def test_invented_members_take_no_memory() -> None:
    """Beyond a limit the one that was noted longest ago is forgotten."""
    score = Scored().score
    for number in range(3 * MAX_MEMBERS):
        score.refused(number.to_bytes(20, "big"))
        score.answered(number.to_bytes(20, "big"))
    assert len(score._records) == MAX_MEMBERS
    assert len(score._answered) == MAX_MEMBERS


@pytest.mark.parametrize("answers", [True, False])
def test_a_member_that_answers_again_is_not_gone_any_more(answers: bool) -> None:
    """The next tick asks it; without an answer it stays gone."""

    async def scenario() -> None:
        swarm = ScriptedSwarm(contact("a"), [contact("b"), contact("c")])
        context = context_of(swarm, owner_of("a"))
        silence = TransportError("timeout", Address("10.0.0.1", 98), "no answer")
        swarm.answers["survey"] = lambda *_: SurveyAnswer([]) if answers else silence
        found = context.view.score
        found.answered(C)
        for _ in range(UNANSWERED):
            found.unanswered(B)
            await asyncio.sleep(SILENT_S / (UNANSWERED - 1))
        assert context.view.is_gone(B)
        directory = OwnerDirectory(context)
        await Failover(context, directory).ask_silent(B)
        assert context.view.is_gone(B) is not answers

    VirtualLoop().run(scenario())


def test_requests_without_an_answer_make_a_living_member_gone_and_no_candidate() -> None:
    """A member that the failure detector finds alive answers no request, another does: to the exchange it is gone. An
    answer that it sends then brings it back."""

    async def scenario() -> None:
        store = store_of("a")
        swarm = ScriptedSwarm(contact("a"), [contact("b"), contact("c")])
        context = context_of(swarm, store)
        directory, question = OwnerDirectory(context), LocateOwners(GENESIS, [], [])
        is_silent = True

        def answer(to: Any, _payload: bytes) -> Any:
            timeout = TransportError("timeout", Address("10.0.0.1", 1), "no answer")
            return timeout if is_silent and to.node_id == B else LocateOwnersAnswer([])

        async def ask(name: str) -> None:
            await context.rpc.ask(contact(name), "where_is", question, LocateOwnersAnswer, 1.0)

        swarm.answers["where_is"] = answer
        for _ in range(UNANSWERED):
            with pytest.raises(TransportError):
                await ask("b")
            await ask("c")
            await asyncio.sleep(SILENT_S / (UNANSWERED - 1) + 0.1)
        assert swarm.is_alive(B)
        assert context.view.is_gone(B)
        assert not context.view.is_gone(C)
        assert [one.node_id for one in await directory.candidates(0)] == [IDS["a"], C]
        is_silent = False
        await ask("b")
        assert not context.view.is_gone(B)

    VirtualLoop().run(scenario())


def test_where_all_others_are_left_out_they_stay_candidates() -> None:
    """One that has failed is better than no backup."""

    async def scenario() -> None:
        swarm = ScriptedSwarm(contact("a"), [contact("b"), contact("c")])
        context = context_of(swarm, owner_of("a"))
        directory = OwnerDirectory(context)
        for name in ("b", "c"):
            assert len(await directory.candidates(0)) == 3 - (name == "c")
            for _ in range(LIMITS["refuses"][0]):
                context.view.score.refused(IDS[name])
                await asyncio.sleep(APART_S)
        assert [one.node_id for one in await directory.candidates(0)] == [IDS["a"], B, C]

    VirtualLoop().run(scenario())
