"""Refusals that cannot be true, as the origin of a delta can tell."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from tests.harness.builders.stores import IDS, contact, store_of
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import GENESIS, ScriptedSwarm, context_of
from training.encoding import codecs
from training.exchange.client.refusals import ATTEMPTS, FalseRefusals
from training.exchange.messages import Push, PushResult
from training.exchange.owner.delta_item import IncomingDelta
from training.exchange.reliability import APART_S, MISBEHAVIOURS

LIMIT = 10


def item(value: float) -> IncomingDelta:
    values = np.full(4, value, np.float32)
    return IncomingDelta.received(0, codecs.as_bytes(values), "float32", values.size)


def refusals(median: int = 20) -> FalseRefusals:
    swarm = ScriptedSwarm(contact("a"), [contact("b"), contact("c")])
    for peer in swarm.peers.values():
        peer.step = median
    context = dataclasses.replace(context_of(swarm, store_of("a")), stale_limit=LIMIT)
    context.run.step = median
    return FalseRefusals(context)


def contradicts(found: FalseRefusals, reason: str, *, base: int = 19, step: int = 20, value: float = 0.01) -> bool:
    push = Push(GENESIS, IDS["a"], 1, step, base, 0.3, [0])
    return found.contradicts(push, contact("b"), PushResult(0, "refused", reason=reason), lambda: item(value))


@pytest.mark.parametrize(
    ("reason", "true", "false"),
    [
        ("late", {"base": 20 - LIMIT}, {"base": 19}),
        ("ahead", {"step": 10**9}, {"step": 20}),
        ("not_finite", {"value": float("inf")}, {"value": 1.0}),
        ("out_of_range", {"value": 1e9}, {"value": 0.01}),
    ],
)
def test_a_reason_that_the_origin_can_judge_is_believed_where_it_may_be_true(
    reason: str, true: dict[str, float], false: dict[str, float]
) -> None:
    """And where it cannot, the delta stays in the outbox."""

    async def scenario() -> None:
        assert not contradicts(refusals(), reason, **true)  # type: ignore[arg-type]
        assert contradicts(refusals(), reason, **false)  # type: ignore[arg-type]

    run(scenario())


@pytest.mark.parametrize("reason", ["not_yours", "shape", "malformed", "sparse"])
def test_what_no_honest_owner_says_is_never_true(reason: str) -> None:
    """A reason that this version does not know may be."""

    async def scenario() -> None:
        assert contradicts(refusals(), reason)
        assert not contradicts(refusals(), "of a later version")

    run(scenario())


def test_a_new_era_refuses_until_the_bases_have_passed_every_step_it_can_begin_with() -> None:
    """However many deltas that are: a fast node sends more. Since the last delta that was added."""

    async def scenario() -> None:
        found = refusals()
        for first in (19, 40):
            for base in range(first, first + LIMIT + 1):
                assert not any(contradicts(found, "before_era", base=base, step=base + 1) for _ in range(6)), base
            assert contradicts(found, "before_era", base=first + LIMIT + 1, step=first + LIMIT + 2)
            push = Push(GENESIS, IDS["a"], 1, 20, 19, 0.3, [0])
            assert not found.contradicts(push, contact("b"), PushResult(0, "ok", 7), lambda: item(0.0))

    run(scenario())


def test_who_refuses_for_no_reason_again_and_again_is_left_out_for_a_while() -> None:
    """The delta is sent so often that it outlasts that, and no more; nobody knows who is behind the answer of a relay,
    and a node believes itself."""

    async def scenario() -> None:
        found = refusals()
        context = found._context
        for number in range(MISBEHAVIOURS):
            assert IDS["b"] in context.view.trust, number
            assert contradicts(found, "shape")
            await asyncio.sleep(2 * APART_S)
        assert IDS["b"] not in context.view.trust
        again = [contradicts(found, "shape") for _ in range(ATTEMPTS)]
        assert again.count(True) == ATTEMPTS - MISBEHAVIOURS - 1
        push = Push(GENESIS, IDS["a"], 1, 21, 20, 0.3, [0])
        refused = PushResult(0, "refused", reason="shape")
        for by in (None, contact("a")):
            assert not refusals().contradicts(push, by, refused, lambda: item(0.0))

    run(scenario())
