"""What an owner has acknowledged is noted, with this node's copy of the shard where that lacks it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from overlay.peers import Contact
from tests.harness.builders.stores import IDS, backup_of, contact, delta, store_of, term
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import GENESIS, ScriptedSwarm, context_of
from training.encoding.codecs import CodecName
from training.exchange.audit_records.acknowledged import Acknowledged, AcknowledgedKey
from training.exchange.client.acknowledgement import COPIED_BYTES, note_acknowledged
from training.exchange.messages import Push
from training.exchange.store.repair_log import RepairLog
from training.exchange.store.shard_store import ShardStore
from training.shards.applied import DeltaId

KEY = AcknowledgedKey(0, DeltaId(IDS["b"], 1, 5))


@dataclass
class Shard:
    encoded: bytes | bytearray = b"1234"
    is_borrowed: bool = False
    shard: int = 0
    codec: CodecName = "float32"
    values: int = 1


def noted(store: ShardStore, by: Contact | None = None, shard: Shard | None = None) -> Acknowledged | None:
    async def scenario() -> Any:
        context = context_of(ScriptedSwarm(contact("b"), [contact("a")]), store)
        note_acknowledged(context, Push(GENESIS, IDS["b"], 1, 5, 4, 1.0, []), by, shard or Shard())
        return context.acknowledged.find(KEY)

    found: Acknowledged | None = run(scenario())
    return found


def test_a_backup_that_lacks_what_its_owner_acknowledges_notes_its_copy() -> None:
    """Not one that has it, backs up another owner, or still learns."""
    store = backup_of("b", "a")
    found = noted(store, contact("a"))
    assert found is not None
    assert found.doubt is store.backed[0].token
    assert (found.owner, found.encoded) == (IDS["a"], b"1234")

    has = backup_of("b", "a")
    has.accept_forward(0, term(1, "a"), delta(5, node="b"), 0, IDS["a"])
    learner = store_of("b")
    assert learner.begin_catch_up(0, term(1, "a"), contact("a"))
    for other, by in [(has, "a"), (backup_of("b", "a"), "c"), (learner, "a"), (store_of("b"), "a")]:
        found = noted(other, contact(by))
        assert found is not None
        assert found.doubt is None


def test_what_others_have_handed_on_is_no_evidence_against_the_owner() -> None:
    """It is kept for the owner that is known, if one is."""
    found = noted(backup_of("b", "a"))
    assert found is not None
    assert (found.owner, found.doubt) == (IDS["a"], None)
    assert noted(store_of("b")) is None


def test_what_this_node_has_added_itself_is_not_kept() -> None:
    assert noted(store_of("b"), contact("b")) is None


@pytest.mark.parametrize(("size", "is_kept"), [(COPIED_BYTES, True), (COPIED_BYTES + 1, False)])
def test_of_the_trainers_memory_a_copy_is_kept_if_it_is_small(size: int, is_kept: bool) -> None:
    memory = bytearray(size)
    found = noted(store_of("b"), contact("a"), Shard(memory, is_borrowed=True))
    assert found is not None
    memory[0] = 1
    assert found.encoded == (bytes(size) if is_kept else None)


@pytest.mark.parametrize(("is_eligible", "log_bytes", "limit"), [(True, 64, 16), (False, 64, 64), (False, 1, 16)])
def test_a_node_that_owns_nothing_keeps_them_in_the_room_of_its_repair_log(
    is_eligible: bool, log_bytes: int, limit: int
) -> None:
    """Its owner may have no backup, and be started again."""

    async def scenario() -> None:
        store = store_of("b")
        store.log = RepairLog(log_bytes << 20, 60.0)
        swarm = ScriptedSwarm(contact("b"), [contact("a")])
        swarm.is_eligible = is_eligible
        context = context_of(swarm, store)
        note_acknowledged(context, Push(GENESIS, IDS["b"], 1, 5, 4, 1.0, []), contact("a"), Shard())
        assert context.acknowledged.limit_bytes == limit << 20

    run(scenario())
