"""A node tells others whom it has left out for audits, and follows them where it has seen something itself."""

from __future__ import annotations

from typing import Any

import pytest

from overlay.transport import TransportError
from tests.harness.builders.stores import IDS, contact, store_of, term
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import GENESIS, ScriptedSwarm, context_of, records_of
from training.exchange import directory
from training.exchange.audit.verdicts import AuditVerdicts
from training.exchange.audit_messages import AuditVerdict, AuditVerdictAnswer
from training.exchange.audit_records.outcomes import MANY
from training.exchange.directory import OwnerDirectory

OTHERS = "acdx"


class Told:
    """The verdicts of node "b", which knows four others."""

    def __init__(self) -> None:
        self.swarm = ScriptedSwarm(contact("b"), [contact(name) for name in OTHERS])
        self.context: Any = context_of(self.swarm, store_of("b"))
        self.verdicts = AuditVerdicts(self.context, OwnerDirectory(self.context))
        self.swarm.answers["audit_verdict"] = lambda *_: AuditVerdictAnswer(True)

    async def hear(self, sender: str, member: str = "a", *, follows: bool = False) -> bool:
        message = AuditVerdict(GENESIS, IDS[member], follows)
        answer = await self.swarm.deliver("audit_verdict", contact(sender), message, AuditVerdictAnswer)
        return bool(answer.is_left_out)

    def told(self) -> list[bytes]:
        return sorted(to.node_id for name, to, _ in self.swarm.requests if name == "audit_verdict")


def test_all_others_of_a_small_swarm_are_told_once() -> None:
    """But the member itself; one that does not answer holds nobody up."""

    async def scenario() -> None:
        one = Told()
        one.swarm.answers["audit_verdict"] = lambda to, _: TransportError("timeout", to.address, "silent")
        one.context.fail_audit(IDS["a"])
        due = one.verdicts.due()
        assert (due, one.verdicts.due()) == ([(IDS["a"], False)], [])
        await one.verdicts.tell(due)
        assert one.told() == sorted(IDS[name] for name in "cdx")
        assert one.swarm.sent("audit_verdict", AuditVerdict)[0] == AuditVerdict(GENESIS, IDS["a"], False)
        assert [record.event for record in records_of(one.context)].count("audit_unanswered") == 3

    run(scenario())


def test_in_a_large_swarm_the_candidates_of_its_shards_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take the shards over; others learn of that from redirects."""
    monkeypatch.setattr(directory, "BROADCAST_MAX_PEERS", 2)

    async def scenario() -> None:
        one = Told()
        one.swarm.candidate_list = [contact("c"), contact("b")]
        await one.verdicts.tell([(IDS["a"], False)])
        assert one.told() == [], "it owns nothing"
        one.context.store.note_owner(0, term(1, "a"), contact("a"))
        await one.verdicts.tell([(IDS["a"], True)])
        assert one.told() == [IDS["c"]]
        assert one.swarm.sent("audit_verdict", AuditVerdict) == [AuditVerdict(GENESIS, IDS["a"], True)]

    run(scenario())


def test_a_verdict_has_its_member_audited_and_left_out_with_what_this_node_has_seen() -> None:
    """It follows then, and says so; what it is told of one that it has left out already changes nothing."""

    async def scenario() -> None:
        one = Told()
        assert not await one.hear("c")
        assert one.context.audits.watchers(IDS["a"], one.context.environment.clock.monotonic()) == 1
        assert not one.context.view.is_gone(IDS["a"])
        one.context.contradicted_itself(IDS["a"], "not_forwarded", 0)
        assert one.context.view.is_gone(IDS["a"])
        assert one.verdicts.due() == [(IDS["a"], True)]
        assert await one.hear("d")
        assert one.verdicts.due() == []

    run(scenario())


def test_many_verdicts_are_enough_and_none_counts_twice_or_of_one_left_out() -> None:
    async def scenario() -> None:
        one = Told()
        for _ in range(5):
            assert not await one.hear("c")
            assert not await one.hear("a"), "of itself"
        assert not await one.hear("x", follows=True)
        one.context.view.trust.suspend(IDS["d"], 1e9)
        assert not await one.hear("d")
        assert not one.context.view.is_gone(IDS["a"])
        assert MANY == 3

        other = Told()
        assert [await other.hear(*who) for who in (("c",), ("d",))] == [False, True], "two found it themselves"
        third = Told()
        heard = [await third.hear("c"), await third.hear("d", follows=True), await third.hear("x", follows=True)]
        assert heard == [False, False, True]

    run(scenario())
