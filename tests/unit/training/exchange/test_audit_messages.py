"""The audit message, encoded and decoded."""

from __future__ import annotations

import msgspec
import pytest

from tests.harness.builders.stores import IDS, term
from tests.harness.stubs.exchange_context import GENESIS
from training.exchange.audit_messages import (
    Audit,
    AuditAnswer,
    AuditedDelta,
    AuditResult,
    AuditVerdict,
    AuditVerdictAnswer,
)
from training.exchange.messages import decode, encode


def test_question_and_answer_are_the_same_after_the_wire() -> None:
    question = Audit(GENESIS, 3, [AuditedDelta(7, 9, b"12345678", *term(4, "a"))], IDS["a"], True)
    assert decode(encode(question), Audit) == question
    assert question.deltas[0].term == term(4, "a")
    answer = AuditAnswer([AuditResult(7, 9, "differs", False, *term(4, "a"), IDS["a"])])
    assert decode(encode(answer), AuditAnswer) == answer
    assert answer.results[0].term == term(4, "a")


@pytest.mark.parametrize("follows", [False, True])
def test_a_verdict_is_the_same_after_the_wire(follows: bool) -> None:
    verdict = AuditVerdict(GENESIS, IDS["a"], follows)
    assert decode(encode(verdict), AuditVerdict) == verdict
    assert decode(encode(AuditVerdictAnswer(follows)), AuditVerdictAnswer) == AuditVerdictAnswer(follows)


def test_a_digest_has_eight_bytes_at_most() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(encode(Audit(GENESIS, 3, [AuditedDelta(7, 9, bytes(9))])), Audit)
