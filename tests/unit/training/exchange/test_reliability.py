"""When a node leaves out a member that lives and does not do what it is asked, and for how long."""

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
from training.exchange.recovery.failover import Failover
from training.exchange.reliability import (
    APART_S,
    ASK_S,
    FAILURES,
    FIRST_S,
    LONGEST_S,
    MAX_MEMBERS,
    MISBEHAVIOUR_WINDOW_S,
    MISBEHAVIOURS,
    RETURNS,
    SILENT_S,
    UNANSWERED,
    WINDOW_S,
    Reliability,
)

B, C = IDS["b"], IDS["c"]


def silent(found: Reliability, since_s: float, every_s: float = SILENT_S / 2, times: int = UNANSWERED) -> None:
    for number in range(times):
        found.unanswered(B, since_s + number * every_s)


def failing(found: Reliability, since_s: float, times: int = FAILURES) -> None:
    for number in range(times):
        found.failed(B, since_s + number * APART_S)


def test_a_member_that_answers_nothing_while_others_do_is_silent_for_a_minute() -> None:
    """It is told once, with how long it lasts; then it is tried again."""
    found = Reliability()
    found.answered(C, 1.0)
    silent(found, 1.0)
    assert found.is_silent(B, 6.0)
    assert not found.is_silent(C, 6.0)
    assert not found.is_candidate(B, 6.0)
    assert found.take_news() == [(B, "silent", FIRST_S)]
    assert found.take_news() == []
    assert not found.is_silent(B, 5.0 + FIRST_S)
    assert found.is_candidate(B, 5.0 + FIRST_S)


def test_a_node_that_nobody_answers_leaves_nobody_out() -> None:
    """Then it is its own line that fails; what others answered before does not count."""
    found = Reliability()
    found.answered(C, 0.9)
    silent(found, 1.0, times=20)
    assert not found.is_silent(B, 1.0 + 10 * SILENT_S)


def test_a_node_with_other_shards_is_left_out_longer_each_time_it_is_met() -> None:
    """While it is left out more of its requests change nothing."""
    found = Reliability()
    until_s = found.foreign(B, 5.0)
    assert (until_s, found.foreign(B, 6.0), found.take_news()) == (5.0 + FIRST_S, until_s, [(B, "foreign", FIRST_S)])
    assert not found.is_candidate(B, until_s - 1.0)
    assert found.is_candidate(B, until_s)
    assert found.foreign(B, until_s) == until_s + 2 * FIRST_S


@pytest.mark.parametrize(("every_s", "times"), [(SILENT_S, UNANSWERED - 1), (SILENT_S / 10, UNANSWERED)])
def test_a_few_lost_answers_or_a_short_silence_are_none(every_s: float, times: int) -> None:
    """Both the number of requests and the time must be long enough."""
    found = Reliability()
    found.answered(C, 1.0)
    silent(found, 1.0, every_s, times)
    assert not found.is_silent(B, 1.0 + times * every_s)


def test_an_answer_ends_a_silence() -> None:
    """Whoever answers again is not gone, and its next silence begins anew."""
    found = Reliability()
    found.answered(C, 1.0)
    silent(found, 1.0)
    found.answered(B, 6.0)
    assert not found.is_silent(B, 6.0)
    found.unanswered(B, 7.0)
    assert not found.is_silent(B, 7.0)


def test_a_silent_member_is_asked_again_until_it_answers() -> None:
    """Every `ASK_S`, and one that is not silent never: after a line of one direction has healed nobody else sends it
    anything."""
    found = Reliability()
    found.answered(C, 1.0)
    silent(found, 1.0)
    assert found.to_ask(6.0) == [B]
    assert found.to_ask(6.0 + ASK_S / 2) == []
    assert found.to_ask(6.0 + ASK_S) == [B]
    found.answered(B, 9.0)
    assert found.to_ask(20.0) == []


@pytest.mark.parametrize("answers", [True, False])
def test_a_member_that_answers_again_is_not_gone_any_more(answers: bool) -> None:
    """The next tick asks it; without an answer it stays gone."""

    async def scenario() -> None:
        swarm = ScriptedSwarm(contact("a"), [contact("b"), contact("c")])
        context = context_of(swarm, owner_of("a"))
        silence = TransportError("timeout", Address("10.0.0.1", 98), "no answer")
        swarm.answers["survey"] = lambda *_: SurveyAnswer([]) if answers else silence
        found, now_s = context.view.reliability, context.environment.clock.monotonic()
        found.answered(C, now_s)
        silent(found, now_s)
        await asyncio.sleep(SILENT_S)
        assert context.view.is_gone(B)
        directory = OwnerDirectory(context)
        await Failover(context, directory).ask_silent(B)
        assert context.view.is_gone(B) is not answers

    VirtualLoop().run(scenario())


def test_a_backup_that_fails_repeatedly_is_no_candidate_and_not_gone() -> None:
    """So many failures within a minute; those of one moment are one."""
    found = Reliability()
    for _ in range(100):
        found.failed(B, 1.0)
    assert found.is_candidate(B, 1.0)
    failing(found, 10.0)
    assert not found.is_candidate(B, 12.0)
    assert not found.is_silent(B, 12.0)
    assert found.take_news() == [(B, "failed", FIRST_S)]
    assert found.is_candidate(B, 12.0 + FIRST_S)


def test_failures_of_long_ago_do_not_count() -> None:
    """A backup that fails every half minute stays a candidate."""
    found = Reliability()
    for number in range(20):
        found.failed(B, number * WINDOW_S / (FAILURES - 1))
        assert found.is_candidate(B, number * WINDOW_S / (FAILURES - 1))


def test_each_time_is_longer_up_to_a_limit() -> None:
    """Who fails again whenever it is tried is tried more rarely."""
    found, now_s, seconds = Reliability(), 0.0, []
    for _ in range(6):
        failing(found, now_s)
        ((_, _, lasts_s),) = found.take_news()
        seconds.append(lasts_s)
        now_s += lasts_s + WINDOW_S
    assert seconds == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S, LONGEST_S, LONGEST_S]


def test_invented_members_take_no_memory() -> None:
    """Beyond a limit the one that was noted longest ago is forgotten."""
    found = Reliability()
    for number in range(3 * MAX_MEMBERS):
        found.failed(number.to_bytes(20, "big"), 0.0)
        found.answered(number.to_bytes(20, "big"), 0.0)
    assert len(found._records) == MAX_MEMBERS
    assert len(found._answered) == MAX_MEMBERS


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
        directory, now_s = OwnerDirectory(context), context.environment.clock.monotonic()
        for name in ("b", "c"):
            assert len(await directory.candidates(0)) == 3 - (name == "c")
            for number in range(FAILURES):
                context.view.reliability.failed(IDS[name], now_s + number * APART_S)
        assert [one.node_id for one in await directory.candidates(0)] == [IDS["a"], B, C]

    VirtualLoop().run(scenario())


def test_a_member_that_comes_back_again_and_again_is_no_candidate() -> None:
    """One return in a minute costs nothing, and it is never gone for that."""
    found = Reliability()
    found.returned(B, 1.0)
    found.returned(B, 2.0 + WINDOW_S)
    assert found.is_candidate(B, 3.0 + WINDOW_S)
    for number in range(1, RETURNS):
        found.returned(B, 10.0 * number + WINDOW_S)
    assert not found.is_candidate(B, 100.0)
    assert not found.is_silent(B, 100.0)
    assert [reason for _, reason, _ in found.take_news()] == ["restarts"]


def test_a_member_contradicts_itself_so_often_before_it_is_left_out() -> None:
    """Those of one moment count once, those of long ago not at all."""
    found = Reliability()
    for number in range(100):
        assert found.misbehaved(B, number * APART_S / 1000) is None
    for number in range(1, 20):
        assert found.misbehaved(B, number * MISBEHAVIOUR_WINDOW_S / (MISBEHAVIOURS - 1)) is None
    began_s = 21 * MISBEHAVIOUR_WINDOW_S
    untils = [found.misbehaved(B, began_s + number * APART_S) for number in range(MISBEHAVIOURS)]
    assert untils == [None] * (MISBEHAVIOURS - 1) + [began_s + (MISBEHAVIOURS - 1) * APART_S + FIRST_S]
    assert found.take_news() == [(B, "misbehaved", FIRST_S)]
    assert not found.is_candidate(B, began_s + FIRST_S)
