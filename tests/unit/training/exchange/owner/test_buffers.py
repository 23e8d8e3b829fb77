"""The integer buffers that all nodes take at the end: those that the owner of the first shard has confirmed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from overlay.transport import TransportError
from tests.harness.builders.stores import contact, owner_of, store_of, term
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of, directory_of
from training.exchange.messages import record_frames
from training.exchange.owner.final_values import BUFFERS_SHARD, BufferAgreement, FinalValues
from training.exchange.ownership_messages import FinalBuffersAnswer, IntegerBuffers
from training.exchange.store.shard_store import ShardStore

OWNER = contact("b")


def node_of(store: ShardStore, answer: Callable[[], Any] | None = None) -> tuple[BufferAgreement, Any, ScriptedSwarm]:
    swarm = ScriptedSwarm(contact("a"), [] if answer is None else [OWNER])
    if answer is not None:
        swarm.answers["final_buffers"] = lambda _to, _payload: answer()
    context = context_of(swarm, store)
    if answer is not None:
        store.note_owner(BUFFERS_SHARD, term(1, "b"), OWNER)
    return BufferAgreement(context, directory_of(context), FinalValues(context)), context, swarm


def test_the_owner_names_its_own() -> None:
    """Those it had named before, if it has finished already."""

    async def scenario() -> None:
        agreement, context, _ = node_of(owner_of("a"))
        assert await agreement.agree(b"mine", 1.0) == b"mine"
        assert await agreement.agree(b"later", 1.0) == b"mine"
        assert context.run.final_buffers == b"mine"

    run(scenario())


def test_another_node_takes_those_of_the_owner() -> None:
    """As soon as the owner names them; its own count for nothing."""

    async def scenario() -> None:
        body = [bytes(buffer) for buffer in record_frames(BUFFERS_SHARD, IntegerBuffers(b"theirs"))]
        answers = [FinalBuffersAnswer(False), FinalBuffersAnswer(False), (FinalBuffersAnswer(True), body)]
        agreement, context, swarm = node_of(store_of("a"), lambda: answers.pop(0))
        assert await agreement.agree(b"mine", 10.0) == b"theirs"
        assert context.run.final_buffers == b"theirs"
        assert [to for name, to, _ in swarm.requests if name == "final_buffers"] == [OWNER] * 3

    run(scenario())


def test_an_owner_that_does_not_answer_is_suspected_and_asked_again() -> None:
    """The error ends nothing."""

    async def scenario() -> None:
        body = [bytes(buffer) for buffer in record_frames(BUFFERS_SHARD, IntegerBuffers(b""))]
        answers: list[Any] = [
            TransportError("timeout", OWNER.address, "no answer"),
            (FinalBuffersAnswer(True), body),
        ]
        agreement, _, swarm = node_of(store_of("a"), lambda: answers.pop(0))
        assert await agreement.agree(b"mine", 10.0) == b""
        assert swarm.suspected == [OWNER.node_id]

    run(scenario())


def test_nothing_is_agreed_on_without_an_owner_in_time() -> None:
    """The caller goes on after its time limit, and no node takes its own for the common ones."""

    async def scenario() -> None:
        for agreement, context, _ in (
            node_of(store_of("a")),
            node_of(store_of("a"), lambda: FinalBuffersAnswer(False)),
        ):
            began_s = asyncio.get_running_loop().time()
            assert await agreement.agree(b"mine", 3.0) is None
            assert asyncio.get_running_loop().time() - began_s == 3.0
            assert context.run.final_buffers is None

    run(scenario())


def test_an_owner_whose_backup_has_not_confirmed_names_none() -> None:
    """Two nodes would take different ones if it died now."""

    async def scenario() -> None:
        store = owner_of("a")
        store.owned[BUFFERS_SHARD].backup = OWNER
        swarm = ScriptedSwarm(contact("a"), [OWNER])
        swarm.answers["compare"] = lambda _to, _payload: TransportError("timeout", OWNER.address, "no answer")
        context = context_of(swarm, store)
        agreement = BufferAgreement(context, directory_of(context), FinalValues(context))
        assert await agreement.agree(b"mine", 3.0) is None
        assert context.run.final_buffers == b"mine"

    run(scenario())
