"""An audit is sent, and its answer read; without one nothing is said."""

from __future__ import annotations

from overlay.transport import TransportError
from tests.harness.builders.stores import IDS, contact, store_of
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import GENESIS, ScriptedSwarm, context_of
from training.exchange.audit.questions import AuditQuestions
from training.exchange.audit_messages import Audit, AuditAnswer, AuditedDelta, AuditResult


def test_answers_come_by_shard_and_step_and_none_is_none() -> None:
    async def scenario() -> None:
        swarm = ScriptedSwarm(contact("a"), [contact("b")])
        context = context_of(swarm, store_of("a"))
        swarm.answers["audit"] = lambda *_: AuditAnswer([AuditResult(2, 7, "has", True)])
        found = await AuditQuestions(context).ask(contact("b"), [AuditedDelta(2, 7)], IDS["c"], is_repeated=True)
        assert found == {(2, 7): AuditResult(2, 7, "has", True)}
        assert swarm.sent("audit", Audit) == [Audit(GENESIS, 1, [AuditedDelta(2, 7)], IDS["c"], True)]

        swarm.answers["audit"] = lambda to, _: TransportError("rejected", to.address, "this node does not serve audit")
        assert await AuditQuestions(context).ask(contact("b"), [AuditedDelta(2, 7)]) is None

    run(scenario())
