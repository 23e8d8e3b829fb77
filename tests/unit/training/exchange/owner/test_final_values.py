"""What may be served as final: what the backup has confirmed, bit for bit, in this version; and integer buffers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import TransportError
from p2pnode.training.exchange.messages import decode
from p2pnode.training.exchange.owner.final_values import BUFFERS_SHARD, FinalValues, value_digest
from p2pnode.training.exchange.ownership_messages import CompareCopies, FinalBuffers, FinalBuffersAnswer, TransferResult
from p2pnode.training.exchange.store.shard_store import ShardStore
from tests.harness.builders.stores import contact, delta, owner_of, store_of, term, zeros
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of
from tests.harness.stubs.exchange_services import final_values_of

BACKUP = contact("b")


class Bench:
    """An owner of shards 0 and 1 whose backup takes for equal what `equal` names."""

    def __init__(self, *, has_backup: bool = True, others: bool = True, synchronous: bool = False) -> None:
        self.store: ShardStore = owner_of("a")
        self.store.own(1, zeros(self.store, 1), term(1, "a"), contact("a"), 0.0, by_handover=False)
        for owned in self.store.owned.values():
            owned.backup = BACKUP if has_backup else None
        self.swarm = ScriptedSwarm(contact("a"), [BACKUP] if others else [])
        self.swarm.answers["compare"] = self._compared
        self.context: Any = context_of(self.swarm, self.store, synchronous=synchronous)
        self.final = final_values_of(self.context)
        self.equal = [0, 1]
        self.meanwhile: Any = lambda: None
        self.error: TransportError | None = None

    def _compared(self, _to: Contact, payload: bytes) -> msgspec.Struct | Exception:
        self.meanwhile()
        asked = decode(payload, CompareCopies)
        return self.error or TransferResult([copy.shard for copy in asked.copies if copy.shard in self.equal], [])

    def compared(self) -> list[list[int]]:
        return [[copy.shard for copy in asked.copies] for asked in self.swarm.sent("compare", CompareCopies)]


def test_digests_differ_where_bits_do() -> None:
    """Zero and minus zero are two values here; equal bits have one digest."""
    zero, minus = np.zeros(4, np.float32), np.array([0.0, 0.0, -0.0, 0.0], np.float32)

    assert value_digest(zero) == value_digest(zero.copy())
    assert value_digest(zero) != value_digest(minus)
    assert len(value_digest(np.zeros(0, np.float32))) == 16


def test_a_value_is_final_once_its_backup_has_the_same() -> None:
    """Both shards in one request; what is confirmed is not asked again."""

    async def scenario() -> None:
        bench = Bench()
        assert not bench.final.is_final(0)
        await bench.final.prepare([0, 1], 1)
        assert [bench.final.is_final(shard) for shard in (0, 1, 2)] == [True, True, False]
        await bench.final.prepare([0, 1], 1)
        assert bench.compared() == [[0, 1]]

    run(scenario())


def test_a_delta_ends_the_confirmation() -> None:
    """The backup may have added it in another order."""

    async def scenario() -> None:
        bench = Bench()
        await bench.final.prepare([0], 1)
        bench.store.add(0, delta(1))
        assert not bench.final.is_final(0)
        await bench.final.prepare([0], 1)
        assert bench.final.is_final(0)

    run(scenario())


def test_a_delta_that_comes_during_the_comparison_leaves_it_open() -> None:
    """The next attempt compares the new value."""

    async def scenario() -> None:
        bench = Bench()
        bench.meanwhile = lambda: bench.store.add(0, delta(1))
        await bench.final.prepare([0], 1)
        assert not bench.final.is_final(0)
        assert bench.store.owned[0].backup == BACKUP
        bench.meanwhile = lambda: None
        await bench.final.prepare([0], 1)
        assert bench.final.is_final(0)

    run(scenario())


def test_a_backup_with_other_bits_is_dropped() -> None:
    """Under a higher term, and a new one is looked for; the other shard stays as it is."""

    async def scenario() -> None:
        bench = Bench()
        bench.equal = [1]
        before = bench.store.owned[0].term
        await bench.final.prepare([0, 1], 1)
        assert [bench.final.is_final(shard) for shard in (0, 1)] == [False, True]
        assert [bench.store.owned[shard].backup for shard in (0, 1)] == [None, BACKUP]
        assert bench.store.owned[0].term > before

    run(scenario())


def test_a_backup_that_does_not_answer_is_suspected_and_keeps_its_place() -> None:
    """It may have the same bits."""

    async def scenario() -> None:
        bench = Bench()
        bench.error = TransportError("timeout", BACKUP.address, "no answer")
        await bench.final.prepare([0], 1)
        assert not bench.final.is_final(0)
        assert bench.swarm.suspected == [BACKUP.node_id]
        assert bench.store.owned[0].backup == BACKUP

    run(scenario())


def test_a_shard_that_is_moving_is_not_final() -> None:
    """It is about to change; it is compared with nobody."""

    async def scenario() -> None:
        bench = Bench()
        bench.store.owned[0].moving = True
        await bench.final.prepare([0], 1)
        assert not bench.final.is_final(0)
        assert bench.compared() == []

    run(scenario())


def test_without_a_backup_a_value_is_final_only_where_nobody_could_be_one() -> None:
    """A node alone; with others a backup is awaited, also while it learns."""

    async def scenario() -> None:
        assert Bench(has_backup=False, others=False).final.is_final(0)
        waiting = Bench(has_backup=False)
        await waiting.final.prepare([0], 1)
        assert not waiting.final.is_final(0)
        waiting.store.owned[0].learner = BACKUP
        assert not waiting.final.is_final(0)

    run(scenario())


def test_under_bulk_synchronous_rules_the_step_is_made_visible_first() -> None:
    """Deltas of the last step that wait for its barrier belong to the final value."""

    async def scenario() -> None:
        bench = Bench(synchronous=True)
        bench.store.add(0, delta(1, synchronous=True))
        assert bench.store.owned[0].state.value.tolist() == [0.0] * 4
        await bench.final.prepare([0], 1)
        assert bench.store.owned[0].state.value.tolist() == [1.0] * 4
        assert bench.final.is_final(0)

    run(scenario())


def test_two_callers_compare_one_after_the_other() -> None:
    """The second finds what the first has confirmed."""

    async def scenario() -> None:
        bench = Bench()
        bench.swarm.request_s = 1.0
        await asyncio.gather(bench.final.prepare([0], 1), bench.final.prepare([0], 1))
        assert bench.compared() == [[0]]

    run(scenario())


OWNER, KEEPER = contact("b"), contact("c")


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
        store.owned[BUFFERS_SHARD].backup = KEEPER
        swarm, there = ScriptedSwarm(contact("a"), [KEEPER]), ScriptedSwarm(KEEPER)
        final, at_backup = final_values_of(context_of(swarm, store)), final_values_of(context_of(there, owner_of("c")))
        swarm.answers["final_buffers"] = lambda _to, _payload: TransportError("timeout", KEEPER.address, "no answer")
        final.register()
        at_backup.register()
        assert await final.agree_on_buffers(b"mine", 3.0) is None
        question = FinalBuffers()
        assert await swarm.deliver("final_buffers", OWNER, question, FinalBuffersAnswer) == FinalBuffersAnswer()

        swarm.linked[KEEPER.node_id] = there
        assert await final.agree_on_buffers(b"later", 3.0) == b"mine"
        asked = len(swarm.requests)
        for node in (swarm, there):
            answer = await node.deliver("final_buffers", OWNER, question, FinalBuffersAnswer)
            assert answer == FinalBuffersAnswer(b"mine")
        assert len(swarm.requests) == asked

    run(scenario())
