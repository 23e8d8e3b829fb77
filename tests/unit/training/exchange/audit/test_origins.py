"""Nodes are asked whether deltas that others offer in repairs are theirs, and say so."""

from __future__ import annotations

from typing import Any

import pytest

from overlay.transport import NOT_SERVED, TransportError
from tests.harness.builders.stores import IDS, contact, store_of
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import GENESIS, ScriptedSwarm, context_of
from training.exchange.audit import origins
from training.exchange.audit.answers import digest_of
from training.exchange.audit.origins import DeltaOrigins, OfferedDelta
from training.exchange.audit_messages import AuditAnswer, AuditedDelta, AuditResult, ConfirmDeltas
from training.exchange.audit_records.acknowledged import Acknowledged
from training.exchange.client.delivery import Outgoing
from training.exchange.messages import Push
from training.exchange.trust import LIES
from training.shards.applied import DeltaId

ME, ORIGIN, OTHER = contact("a"), contact("b"), contact("c")


def offered(step: int, encoded: bytes = b"true", node: str = "b", incarnation: int = 1) -> OfferedDelta:
    return OfferedDelta(0, DeltaId(IDS[node], incarnation, step), encoded)


def node_of(name: str = "a") -> tuple[DeltaOrigins, ScriptedSwarm, Any]:
    others = [one for one in (ME, ORIGIN, OTHER) if one != contact(name)]
    swarm = ScriptedSwarm(contact(name), others)
    context = context_of(swarm, store_of(name))
    return DeltaOrigins(context), swarm, context


def sends(context: Any, step: int, encoded: bytes = b"true") -> None:
    """The node has this delta of shard 0 on its way."""
    identity = DeltaId(context.swarm.node_id, 1, step)
    context.kept.leave(identity)
    context.kept.keep(identity, {0: Outgoing(0, encoded, "float32", 1)})


def acknowledged(context: Any, step: int, encoded: bytes | None = b"true") -> None:
    """Node c has acknowledged this delta of shard 0."""
    identity = DeltaId(context.swarm.node_id, 1, step)
    context.kept.leave(identity)
    context.kept.drop(identity)
    push = Push(GENESIS, context.swarm.node_id, 1, step, 0, 1.0, [])
    context.acknowledged.note(0, Acknowledged(push, OTHER.node_id, 0.0, "float32", 1, encoded))


async def answers(swarm: ScriptedSwarm, *deltas: tuple[int, bytes], incarnation: int = 1) -> list[tuple[int, str]]:
    asked = [AuditedDelta(0, step, digest_of(encoded)) for step, encoded in deltas]
    answer = await swarm.deliver("confirm_deltas", OTHER, ConfirmDeltas(GENESIS, incarnation, asked), AuditAnswer)
    return sorted((one.step, one.known) for one in answer.results)


def test_a_node_knows_its_deltas_on_their_way_and_those_that_were_acknowledged() -> None:
    """It compares them with what is offered. Of those that it keeps no more, or never sent, it cannot tell; those after
    its last one it has not made yet, in this start and in later ones."""

    async def scenario() -> None:
        _, swarm, context = node_of("b")
        assert await answers(swarm, (1, b"true")) == [(1, "lacks")]
        acknowledged(context, 3)
        acknowledged(context, 4, None)
        sends(context, 5)
        assert await answers(swarm, (3, b"true"), (5, b"true")) == [(3, "has"), (5, "has")]
        assert await answers(swarm, (3, b"false"), (5, b"false")) == [(3, "differs"), (5, "differs")]
        assert await answers(swarm, (2, b"true"), (4, b"true")) == [(2, "forgotten"), (4, "forgotten")]
        assert await answers(swarm, (6, b"true")) == [(6, "lacks")]
        assert await answers(swarm, (1, b"true"), incarnation=2) == [(1, "lacks")]
        assert await answers(swarm, (9, b"true"), incarnation=0) == [(9, "forgotten")]

    run(scenario())


def test_of_many_deltas_some_are_compared_and_the_others_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One at least, however large: so that a question costs little, whoever asks."""
    monkeypatch.setattr(origins, "MAX_HASHED_BYTES", 9)

    async def scenario() -> None:
        _, swarm, context = node_of("b")
        for step, size in ((1, 20), (2, 5), (3, 5), (4, 4)):
            sends(context, step, bytes(size))
        assert await answers(swarm, (1, bytes(20)), (2, bytes(5))) == [(1, "has")]
        assert await answers(swarm, (2, bytes(5)), (3, bytes(5)), (4, bytes(4))) == [(2, "has"), (4, "has")]

    run(scenario())


def test_each_origin_is_asked_once_about_its_deltas() -> None:
    """By start; this node knows its own. What was not answered is open, and so is a second delta under one identity."""

    async def scenario() -> None:
        asking, swarm, context = node_of()
        _, swarm.linked[ORIGIN.node_id], theirs = node_of("b")
        sends(theirs, 5)
        sends(context, 7)
        swarm.answers["confirm_deltas"] = lambda *_: AuditAnswer([AuditResult(0, 1, "has")])
        deltas = [offered(5), offered(6), offered(5, node="c"), offered(7, node="a"), offered(5, b"false")]
        found = await asking.ask([*deltas, offered(1, node="c"), offered(3, incarnation=0)])
        assert found == ["has", "lacks", None, "has", None, "has", "forgotten"]
        messages = swarm.sent("confirm_deltas", ConfirmDeltas)
        asked = [
            (to.node_id, [one.step for one in message.deltas])
            for (_, to, _), message in zip(swarm.requests, messages, strict=True)
        ]
        assert sorted(asked) == [(IDS["b"], [3]), (IDS["b"], [5, 6]), (IDS["c"], [5, 1])]

    run(scenario())


@pytest.mark.parametrize("why", ["gone", "left out", "no stream reaches it", "unknown", "an earlier version"])
def test_a_node_that_cannot_be_asked_contradicts_nothing(why: str) -> None:
    """Only one of an earlier version is asked at all, and says that it does not serve the question."""

    async def scenario() -> None:
        asking, swarm, context = node_of()
        node = "x" if why == "unknown" else "b"
        rejection = TransportError("rejected", ORIGIN.address, f"{NOT_SERVED} confirm_deltas")
        swarm.answers["confirm_deltas"] = lambda *_: rejection
        if why == "gone":
            swarm.gone.append(ORIGIN.node_id)
        elif why == "left out":
            for at_s in range(LIES):
                context.view.trust.note(ORIGIN.node_id, "value", float(10 * at_s))
        elif why == "no stream reaches it":
            swarm.peers[ORIGIN.node_id].eligible = False
        assert await asking.ask([offered(5, node=node)]) == ["forgotten"]
        assert len(swarm.requests) == (why == "an earlier version")

    run(scenario())


@pytest.mark.parametrize("kind", ["timeout", "rejected"])
def test_an_origin_that_does_not_answer_now_is_asked_again_later(kind: Any) -> None:
    """It may be behind a full line, or divide its shards: nothing is known meanwhile."""

    async def scenario() -> None:
        asking, swarm, _ = node_of()
        swarm.answers["confirm_deltas"] = lambda *_: TransportError(kind, ORIGIN.address, "not now")
        assert await asking.ask([offered(5)]) == [None]

    run(scenario())
