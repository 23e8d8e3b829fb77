"""The integer buffers that all nodes take at the end: those that the owner of the first shard has confirmed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from p2pnode.overlay.transport import TransportError
from p2pnode.training.exchange.owner.final_values import BUFFERS_SHARD, FinalValues
from p2pnode.training.exchange.ownership_messages import FinalBuffers, FinalBuffersAnswer
from p2pnode.training.exchange.store.shard_store import ShardStore
from tests.harness.builders.stores import contact, owner_of, store_of, term
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of
from tests.harness.stubs.exchange_services import final_values_of

OWNER, BACKUP = contact("b"), contact("c")


def node_of(store: ShardStore, answer: Callable[[], Any] | None = None) -> tuple[FinalValues, ScriptedSwarm]:
    swarm = ScriptedSwarm(contact("a"), [] if answer is None else [OWNER])
    if answer is not None:
        swarm.answers["final_buffers"] = lambda _to, _payload: answer()
        store.note_owner(BUFFERS_SHARD, term(1, "b"), OWNER)
    return final_values_of(context_of(swarm, store)), swarm


def test_the_owner_names_its_own() -> None:
    """Those it had named before, if it has finished already."""

    async def scenario() -> None:
        final, _ = node_of(owner_of("a"))
        assert await final.agree_on_buffers(b"mine", 1.0) == b"mine"
        assert await final.agree_on_buffers(b"later", 1.0) == b"mine"

    run(scenario())


def test_another_node_takes_those_of_the_owner() -> None:
    """As soon as the owner names them; its own count for nothing."""

    async def scenario() -> None:
        answers = [FinalBuffersAnswer(), FinalBuffersAnswer(), FinalBuffersAnswer(b"theirs")]
        final, swarm = node_of(store_of("a"), lambda: answers.pop(0))
        assert await final.agree_on_buffers(b"mine", 10.0) == b"theirs"
        assert [to for name, to, _ in swarm.requests if name == "final_buffers"] == [OWNER] * 3

    run(scenario())


def test_an_owner_that_does_not_answer_is_suspected_and_asked_again() -> None:
    """The error ends nothing."""

    async def scenario() -> None:
        answers: list[Any] = [TransportError("timeout", OWNER.address, "no answer"), FinalBuffersAnswer(b"")]
        final, swarm = node_of(store_of("a"), lambda: answers.pop(0))
        assert await final.agree_on_buffers(b"mine", 10.0) == b""
        assert swarm.suspected == [OWNER.node_id]

    run(scenario())


def test_nothing_is_agreed_on_without_an_owner_in_time() -> None:
    """The caller goes on after its time limit."""

    async def scenario() -> None:
        for final, _ in (node_of(store_of("a")), node_of(store_of("a"), FinalBuffersAnswer)):
            began_s = asyncio.get_running_loop().time()
            assert await final.agree_on_buffers(b"mine", 3.0) is None
            assert asyncio.get_running_loop().time() - began_s == 3.0

    run(scenario())


def test_an_owner_names_none_before_its_backup_keeps_them() -> None:
    """Two nodes would take different ones if it died now. The backup names them when it owns the shard."""

    async def scenario() -> None:
        store = owner_of("a")
        store.owned[BUFFERS_SHARD].backup = BACKUP
        swarm, there = ScriptedSwarm(contact("a"), [BACKUP]), ScriptedSwarm(BACKUP)
        final, at_backup = final_values_of(context_of(swarm, store)), final_values_of(context_of(there, owner_of("c")))
        swarm.answers["final_buffers"] = lambda _to, _payload: TransportError("timeout", BACKUP.address, "no answer")
        final.register()
        at_backup.register()
        assert await final.agree_on_buffers(b"mine", 3.0) is None
        question = FinalBuffers()
        assert await swarm.deliver("final_buffers", OWNER, question, FinalBuffersAnswer) == FinalBuffersAnswer()

        swarm.linked[BACKUP.node_id] = there
        assert await final.agree_on_buffers(b"later", 3.0) == b"mine"
        asked = len(swarm.requests)
        for node in (swarm, there):
            answer = await node.deliver("final_buffers", OWNER, question, FinalBuffersAnswer)
            assert answer == FinalBuffersAnswer(b"mine")
        assert len(swarm.requests) == asked

    run(scenario())
