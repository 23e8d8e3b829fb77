"""An owner and a backup answer an audit; a backup that lacks a delta counts who complains of its owner."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.harness.builders.stores import IDS, backup_of, contact, delta, owner_of, store_of, term
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import GENESIS, ScriptedSwarm, context_of
from training.encoding.codecs import as_bytes
from training.exchange.audit import answers
from training.exchange.audit.answers import STARTED_S, AuditAnswers, digest_of
from training.exchange.audit_messages import Audit, AuditAnswer, AuditedDelta
from training.exchange.run_state import Phase
from training.exchange.store.repair_log import RepairLog
from training.exchange.store.shard_store import ShardStore

ME, OWNER = contact("b"), contact("a")


def answering(store: ShardStore) -> tuple[ScriptedSwarm, Any]:
    swarm = ScriptedSwarm(ME, [OWNER, contact("c"), contact("d"), contact("x")])
    context = context_of(swarm, store)
    AuditAnswers(context)
    return swarm, context


async def ask(swarm: ScriptedSwarm, question: Audit, sender: str = "x") -> list[tuple[str, bool, bytes]]:
    answer = await swarm.deliver("audit", contact(sender), question, AuditAnswer)
    return [(one.known, one.is_owner, one.partner) for one in answer.results]


def asked(step: int, digest: bytes = b"", shard: int = 0) -> Audit:
    return Audit(GENESIS, 1, [AuditedDelta(shard, step, digest)])


def test_an_owner_says_what_it_has_and_who_backs_it_up() -> None:
    """Only the sender's own deltas are answered about: identities have its id."""

    async def scenario() -> None:
        store = owner_of("a")
        store.owned[0].backup = contact("c")
        store.add(0, delta(5))
        swarm, _ = answering(store)
        assert await ask(swarm, asked(5)) == [("has", True, IDS["c"])]
        assert await ask(swarm, asked(6)) == [("lacks", True, IDS["c"])]
        assert await ask(swarm, asked(5), "d") == [("lacks", True, IDS["c"])]
        assert await ask(swarm, asked(5, shard=1)) == [("other", False, b"")]

    run(scenario())


def test_a_backup_says_what_it_was_sent() -> None:
    """With a digest it says whether that was the same delta; without the delta in its log it cannot tell."""

    async def scenario() -> None:
        store = backup_of("b", "a")
        store.log = RepairLog(1 << 20, 60.0)
        sent = delta(5)
        store.accept_forward(0, term(1, "a"), sent, 0, IDS["a"])
        swarm, _ = answering(store)
        digest = digest_of(as_bytes(sent.delta))
        assert await ask(swarm, asked(5)) == [("has", False, IDS["a"])]
        assert await ask(swarm, asked(5, digest)) == [("has", False, IDS["a"])]
        assert await ask(swarm, asked(5, bytes(8))) == [("differs", False, IDS["a"])]
        assert await ask(swarm, asked(6, digest)) == [("lacks", False, IDS["a"])]
        store.log = RepairLog(0, 0.0)
        assert await ask(swarm, asked(5, bytes(8))) == [("has", False, IDS["a"])]

    run(scenario())


def test_of_many_deltas_only_some_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a question costs little, whoever asks."""
    monkeypatch.setattr(answers, "MAX_HASHED_BYTES", 40)

    async def scenario() -> None:
        store = backup_of("b", "a")
        store.log = RepairLog(1 << 20, 60.0)
        for step in range(5, 9):
            store.accept_forward(0, term(1, "a"), delta(step), 0, IDS["a"])
        swarm, _ = answering(store)
        question = Audit(GENESIS, 1, [AuditedDelta(0, step, bytes(8)) for step in range(5, 9)])
        assert [known for known, *_ in await ask(swarm, question)] == ["differs", "differs", "has", "has"]

    run(scenario())


def test_a_learner_cannot_tell() -> None:
    async def scenario() -> None:
        store = store_of("b")
        assert store.begin_catch_up(0, term(1, "a"), OWNER)
        swarm, _ = answering(store)
        assert await ask(swarm, asked(5)) == [("forgotten", False, IDS["a"])]

    run(scenario())


def complaint(step: int = 6, owner: str = "a") -> Audit:
    return Audit(GENESIS, 1, [AuditedDelta(0, step)], IDS[owner], True)


def test_two_members_that_complain_have_an_owner_left_out_and_one_has_not() -> None:
    """Its backup takes the shard over then."""

    async def scenario() -> None:
        swarm, context = answering(backup_of("b", "a"))
        for _ in range(10):
            await ask(swarm, complaint())
            await asyncio.sleep(5.0)
        assert not context.view.is_gone(IDS["a"])
        await ask(swarm, complaint(7), "c")
        assert context.view.is_gone(IDS["a"])
        assert context.view.reliability.take_news() == [(IDS["a"], "audit", 60.0)]

    run(scenario())


def test_what_the_backup_has_is_no_complaint() -> None:
    """Nor a question that was not repeated, nor one of the owner itself, nor of a member that is left out."""

    async def scenario() -> None:
        store = backup_of("b", "a")
        store.accept_forward(0, term(1, "a"), delta(6), 0, IDS["a"])
        store.accept_forward(0, term(1, "a"), delta(6, node="c"), 0, IDS["a"])
        swarm, context = answering(store)
        for sender in "xcd":
            await ask(swarm, asked(9), sender)
        await ask(swarm, complaint(6), "x")
        await ask(swarm, complaint(6), "c")
        await ask(swarm, complaint(9), "a")
        context.view.trust.suspend(IDS["d"], 1e9)
        await ask(swarm, complaint(9), "d")
        assert context.counters.audits_failed == 0
        await ask(swarm, complaint(9), "x")
        assert not context.view.is_gone(IDS["a"])

    run(scenario())


def test_who_is_named_as_a_backup_and_is_none_counts_it_once_it_has_run_for_a_while() -> None:
    """A node that was started again may have been the backup; so may one that has taken over since."""

    async def scenario() -> None:
        swarm, context = answering(store_of("b"))
        await ask(swarm, complaint(), "x")
        await ask(swarm, complaint(), "c")
        assert context.counters.audits_failed == 0
        await asyncio.sleep(STARTED_S)
        await ask(swarm, complaint(), "x")
        await ask(swarm, complaint(), "c")
        assert context.view.is_gone(IDS["a"])

        swarm, context = answering(owner_of("b"))
        await asyncio.sleep(STARTED_S)
        for sender in "xc":
            await ask(swarm, complaint(), sender)
        assert context.counters.audits_failed == 0

        swarm, context = answering(store_of("b"))
        await asyncio.sleep(STARTED_S)
        context.run.enter(Phase.LEAVING)
        for sender in "xc":
            await ask(swarm, complaint(), sender)
        assert context.counters.audits_failed == 0

    run(scenario())
