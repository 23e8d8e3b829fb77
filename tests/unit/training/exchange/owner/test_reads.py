"""Reads: pulled values, encoded once per version, redirects, copies for a joining node, known owners, and copies for a
take-over."""

from __future__ import annotations

import gc
from typing import Any

import msgspec
import numpy as np
import pytest

from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.frames import FrameReader, Part, read_array
from p2pnode.training.exchange.messages import (
    LocateOwners,
    LocateOwnersAnswer,
    Pull,
    PullAnswer,
    Wanted,
    decode,
)
from p2pnode.training.exchange.owner import reads as module
from p2pnode.training.exchange.owner.published import digest_of
from p2pnode.training.exchange.owner.reads import EncodingCache
from p2pnode.training.exchange.ownership_messages import (
    Fetch,
    ReplicasAnswer,
    ShardList,
)
from p2pnode.training.exchange.store import shard_states
from p2pnode.training.exchange.store.shard_states import ANY_STEPS
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import ZERO_TERM, Fence
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.shards.state import ShardState
from tests.harness.builders.stores import IDS, backup_of, contact, delta, owner_of, store_of, term
from tests.harness.environment.simulated import InlineExecutor
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of
from tests.harness.stubs.exchange_services import reads_of
from tests.harness.swarms.exchange_overlay import chunks, collected

PEER = contact("x")
NOTHING = Wanted(0, ZERO_TERM, 0)


def handler_of(
    store: ShardStore, name: str = "a", settings: ExchangeSettings | None = None
) -> tuple[ScriptedSwarm, Any]:
    swarm = ScriptedSwarm(contact(name))
    context = context_of(swarm, store, settings=settings)
    reads_of(context).register()
    return swarm, context


async def pulled(swarm: ScriptedSwarm, pull: Pull) -> tuple[PullAnswer, list[bytes]]:
    response = await swarm.respond("pull", PEER, pull)
    return decode(response.head, PullAnswer), await collected(response.body)


def pull_of(*wanted: Wanted, takes_copies: bool = False) -> Pull:
    return Pull(1, "float32", list(wanted), takes_copies=takes_copies)


def test_an_owner_sends_the_value_only_if_it_changed() -> None:
    """The puller names term and version of its copy."""

    async def scenario() -> None:
        store = owner_of("a")
        store.add(0, delta(1))
        swarm, _ = handler_of(store)

        answer, body = await pulled(swarm, pull_of(NOTHING))
        (result,) = answer.results
        assert (result.status, result.term, result.version) == ("value", term(1, "a"), 1)
        value, _, _ = await read_array(FrameReader(chunks(body)), 0, Part.VALUE, 4)
        assert value.tolist() == [1.0] * 4

        answer, body = await pulled(swarm, pull_of(Wanted(0, term(1, "a"), 1)))
        assert (answer.results[0].status, body) == ("same", [])

    run(scenario())


def test_who_follows_is_sent_the_published_value_and_then_its_changes() -> None:
    """Whole at the beginning, the same if nothing was added, a change for an addition, the whole without a place."""

    async def scenario() -> None:
        store = owner_of("a")
        store.add(0, delta(1))
        swarm, context = handler_of(store, settings=ExchangeSettings(pull_codec="int8", outer_momentum=0.0))
        follow = Pull(1, "bfloat16", [NOTHING], follows=True)

        answer, body = await pulled(swarm, follow)
        (whole,) = answer.results
        assert (whole.status, whole.version, whole.published, whole.changes) == ("value", 1, 0, 0)
        _, _, codec = await read_array(FrameReader(chunks(body)), 0, Part.VALUE, 4)
        assert codec == "bfloat16"

        here = Wanted(0, whole.term, 1, whole.publication, 0)
        answer, body = await pulled(swarm, msgspec.structs.replace(follow, shards=[here]))
        (same,) = answer.results
        assert (same.status, same.publication, same.digest, body) == ("same", whole.publication, whole.digest, [])

        store.add(0, delta(2))
        answer, body = await pulled(swarm, msgspec.structs.replace(follow, shards=[here]))
        (result,) = answer.results
        assert (result.status, result.version, result.published, result.changes) == ("changes", 2, 1, 1)
        assert result.publication == whole.publication
        assert result.digest not in (b"", whole.digest)
        _, _, codec = await read_array(FrameReader(chunks(body)), 0, Part.CHANGE, 4)
        assert codec == "int8"

        for place in (
            NOTHING,
            Wanted(0, whole.term, 2, b"another.", 1),
            Wanted(0, whole.term, 1, whole.publication, 9),
        ):
            answer, body = await pulled(swarm, msgspec.structs.replace(follow, shards=[place]))
            (result,) = answer.results
            assert (result.status, result.published, result.changes) == ("value", 1, 0)
            value, _, codec = await read_array(FrameReader(chunks(body)), 0, Part.VALUE, 4)
            assert codec == "float32"
            assert digest_of(value) == result.digest
        assert context.counters.bytes_sent > 0

    run(scenario())


def test_an_owner_that_sends_whole_values_sends_them_to_followers_too() -> None:
    """In the codec that they name; nothing is published for them."""

    async def scenario() -> None:
        store = owner_of("a")
        swarm, _ = handler_of(store, settings=ExchangeSettings(pull_codec="float32"))
        follow = Pull(1, "bfloat16", [NOTHING], follows=True)
        for version in (1, 2):
            store.add(0, delta(version))
            answer, body = await pulled(swarm, follow)
            (result,) = answer.results
            assert (result.status, result.publication, result.version) == ("value", b"", version)
            value, _, codec = await read_array(FrameReader(chunks(body)), 0, Part.VALUE, 4)
            assert (codec, value.tolist()) == ("bfloat16", store.owned[0].state.value.tolist())

    run(scenario())


def test_a_value_of_a_take_over_ranks_as_the_copy_it_began_with() -> None:
    """Its own higher term is sent as the owner's, the former one as the rank."""

    async def scenario() -> None:
        store = owner_of("a", 9)
        store.owned[0].rank_as(term(4, "b"))
        swarm, _ = handler_of(store)

        answer, _ = await pulled(swarm, pull_of(NOTHING))

        assert (answer.results[0].term, answer.results[0].rank_term) == (term(9, "a"), term(4, "b"))

    run(scenario())


def test_a_node_that_does_not_own_a_shard_redirects() -> None:
    """Or lets the puller try again, if it knows no owner."""

    async def scenario() -> None:
        store = store_of("a")
        store.note_owner(0, term(2, "b"), contact("b"))
        swarm, _ = handler_of(store)

        answer, _ = await pulled(swarm, pull_of(NOTHING, Wanted(1, ZERO_TERM, 0)))

        assert [result.status for result in answer.results] == ["redirect", "retry"]
        assert answer.results[0].owner_info == store.ownership.owner_info(0)
        assert all(result.denies_ownership for result in answer.results)

    run(scenario())


def test_a_joining_node_gets_copies_of_a_backup_and_of_the_replica() -> None:
    """Only where it asks for copies, and only of shards that were pulled."""

    async def scenario() -> None:
        store = backup_of("b", "a")
        store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"])
        swarm, context = handler_of(store, "b")
        context.replica.slice_of(1)[:] = 7.0
        context.replica.set_version(1, term(3, "c"), 5)

        wanted = [Wanted(shard, ZERO_TERM, 0) for shard in (0, 1, 2, 99)]
        answer, body = await pulled(swarm, pull_of(*wanted, takes_copies=True))

        assert [result.status for result in answer.results] == ["copy", "copy", "retry", "retry"]
        assert answer.results[1].term == term(3, "c")
        reader = FrameReader(chunks(body))
        assert (await read_array(reader, 0, Part.VALUE, 4))[0].tolist() == [1.0] * 4
        assert (await read_array(reader, 1, Part.VALUE, 4))[0].tolist() == [7.0] * 4

    run(scenario())


def test_a_search_for_owners_exchanges_what_both_know() -> None:
    """The claims of the message are recorded, its fences challenge this owner, and all known owners are answered."""

    async def scenario() -> None:
        store = owner_of("a")
        swarm, context = handler_of(store)
        other = store_of("b")
        other.note_owner(1, term(3, "c"), contact("c"))
        claim = other.ownership.owner_info(1)
        assert claim is not None

        question = LocateOwners([], [claim], [Fence(0, term(6, "b"))])
        answer = await swarm.deliver("where_is", PEER, question, LocateOwnersAnswer)

        assert [(known.shard, known.term) for known in answer.known] == [(0, term(1, "a")), (1, term(3, "c"))]
        assert context.store.outranked() == {0: term(6, "b")}

    run(scenario())


def test_a_survey_reports_each_shard_of_the_layout() -> None:
    """A shard index beyond it is left out."""

    async def scenario() -> None:
        swarm, _ = handler_of(owner_of("a"))

        answer = await swarm.deliver("query_replicas", PEER, ShardList([0, 1, 99]), ReplicasAnswer)

        assert [(status.shard, status.role) for status in answer.statuses] == [(0, "owner"), (1, "none")]
        assert [known.shard for known in answer.known] == [0]

    run(scenario())


def test_a_fetch_sends_the_best_copy_that_is_not_owned() -> None:
    """A backup's state as it is; a replica as the state of a new era; nothing for a shard without a copy."""

    async def scenario() -> None:
        store = backup_of("b", "a")
        swarm, context = handler_of(store, "b")
        context.run.step = 12
        context.replica.set_version(1, term(3, "c"), 5)

        response = await swarm.respond("fetch", PEER, Fetch([0, 1, 2]))
        told, reader = decode(response.head, ShardList).shards, FrameReader(chunks(await collected(response.body)))
        found = [await shard_states.read_state(reader, shard, store, ANY_STEPS, InlineExecutor()) for shard in told]

        assert [(shard, of, state.era_step) for shard, (of, state) in zip(told, found, strict=True)] == [
            (0, term(1, "a"), 0),
            (1, term(3, "c"), 12),
        ]

    run(scenario())


SIZE = 1000
plainly = codecs.encode


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many values were encoded, each time."""
    done: list[int] = []

    def counted(values: Any, codec: Any) -> Any:
        done.append(values.size)
        return plainly(values, codec)

    monkeypatch.setattr(module.codecs, "encode", counted)
    return done


def state(seed: int = 1) -> ShardState:
    print(f"seed {seed}")
    return ShardState(value=np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32), parameters=SIZE)


def test_a_version_is_encoded_once(encodings: list[int]) -> None:
    """The second pull gets the first one's encoding; another piece or codec is encoded by itself."""
    kept, one = EncodingCache(), state()
    first = kept.piece(0, one, 0, one.value, "bfloat16")
    assert kept.piece(0, one, 0, one.value, "bfloat16") is first
    assert first == plainly(one.value, "bfloat16")
    kept.piece(0, one, 500, one.value[500:], "bfloat16")
    kept.piece(1, one, 0, one.value, "bfloat16")
    assert encodings == [SIZE, 500, SIZE]


def test_a_new_version_is_encoded_anew(encodings: list[int]) -> None:
    """After an addition the pulled value has it."""
    kept, one = EncodingCache(), state()
    before = bytes(kept.piece(0, one, 0, one.value, "bfloat16"))
    one.apply(DeltaId(b"n" * 20, 1, 1), 1.0, np.ones(SIZE, np.float32), Rule(outer_lr=1.0, outer_momentum=0.0))
    after = kept.piece(0, one, 0, one.value, "bfloat16")
    assert after == plainly(one.value, "bfloat16") != before
    assert len(encodings) == 2
    assert kept.size_bytes == len(after)


def test_another_state_of_the_same_version_is_encoded_anew(encodings: list[int]) -> None:
    """A shard that was lost and returned may have the same version but other values."""
    kept, one = EncodingCache(), state(1)
    kept.piece(0, one, 0, one.value, "bfloat16")
    other = state(2)
    assert kept.piece(0, other, 0, other.value, "bfloat16") == plainly(other.value, "bfloat16")
    del one
    gc.collect()
    assert len(encodings) == 2


def test_the_cache_is_bounded() -> None:
    """The oldest pieces are dropped first."""
    kept = EncodingCache(max_bytes=5 * 2 * SIZE)
    one = state()
    pieces = [kept.piece(shard, one, 0, one.value, "bfloat16") for shard in range(8)]
    assert kept.size_bytes == 5 * 2 * SIZE
    assert kept.piece(7, one, 0, one.value, "bfloat16") is pieces[7]
    assert kept.piece(0, one, 0, one.value, "bfloat16") is not pieces[0]
    assert kept.size_bytes == 5 * 2 * SIZE
