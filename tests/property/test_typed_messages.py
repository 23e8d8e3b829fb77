"""Random and extreme values in every field of every message: nothing fails but the sender, and nothing of it lasts.

What is generated fits the definitions of the messages, so that it passes the decoders
(`tests.harness.builders.typed_values`).
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import msgspec
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2pnode.training.exchange import ownership_messages as moves
from p2pnode.training.exchange.messages import decode, encode
from p2pnode.training.exchange.store import shard_states
from p2pnode.training.exchange.store.shard_states import describe
from p2pnode.training.exchange.terms import FENCES_FILE, MAX_BELIEVED, TERM_LIMIT, _Rows
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.applied import Applied, DeltaId
from p2pnode.training.shards.outer_rule import Rule
from tests.harness.builders.typed_values import KINDS, Typed
from tests.harness.environment.simulated import MemoryDisk
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.swarms.exchange_swarm import GENESIS, World

SHARDS, VALUES = 4, 16
BOUNDS = [(shard * VALUES // SHARDS, (shard + 1) * VALUES // SHARDS) for shard in range(SHARDS)]
FIXED = settings(
    derandomize=True, database=None, max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
chances = st.randoms(use_true_random=False)
IDS = [bytes([number]) * 20 for number in range(3)] + [GENESIS]


@FIXED
@given(chances, st.sampled_from(sorted(KINDS)))
def test_what_is_generated_passes_the_decoder(chance: random.Random, name: str) -> None:
    """Whole messages and changed ones are read back as they were written: the generator keeps to the definitions."""
    typed = Typed(chance, IDS)
    for kind in KINDS[name]:
        message = typed.value(kind)
        assert encode(decode(encode(message), kind)) == encode(message)
        changed = typed.changed(message)
        assert encode(decode(encode(changed), kind)) == encode(changed)


@FIXED
@given(chances)
def test_states_on_a_disk_are_refused_or_can_be_written_again(chance: random.Random) -> None:
    """A file of the right form with any heads: what is taken of it takes another delta, and is read back after it."""
    typed = Typed(chance, IDS)
    heads = [typed.value(moves.StateHead) for _ in range(3)]
    # The last version that is believed is left out: after one more delta it is not, by its definition.
    heads = [
        msgspec.structs.replace(one, shard=one.shard % SHARDS, version=min(one.version, MAX_BELIEVED - 2))
        for one in heads
    ]
    found = _decoded(_file(heads))
    for shard, stored in found.items():
        state = stored.state
        state.apply(DeltaId(IDS[0], 7, 7), 0.5, np.ones(VALUES // SHARDS, np.float32), Rule(0.7, 0.5))
        decode(encode(describe(shard, stored.term, state)), moves.StateHead)
        parts = shard_states.encode(GENESIS, [(shard, stored.term, state)], clean=False)
        assert shard in _decoded(b"".join(parts))


def _file(heads: list[moves.StateHead]) -> bytes:
    values = sum(VALUES // SHARDS * (1 + one.has_momentum + len(one.pending)) for one in heads)
    head = msgspec.msgpack.encode((GENESIS, False, [(one, []) for one in heads]))
    content = len(head).to_bytes(4, "big") + head + np.ones(values, "<f4").tobytes()
    return hashlib.sha256(content).digest() + content


def _decoded(raw: bytes) -> dict[int, Any]:
    return shard_states.decode(raw, GENESIS, BOUNDS, VALUES)


@FIXED
@given(chances)
def test_small_files_on_a_disk_may_say_anything(chance: random.Random) -> None:
    """Fences: read, or refused with their own error; and what was read is written again."""
    typed = Typed(chance, IDS)
    disk = MemoryDisk()
    disk.write(FENCES_FILE, msgspec.msgpack.encode((GENESIS, typed.value(_Rows))))

    async def load() -> None:
        world = World(1, settings=ExchangeSettings(shards=SHARDS), shards=SHARDS, values=VALUES, synchronous=False)
        world.member("a").disk = disk
        member = await world.start("a", founder=True)
        for term in member.exchange.store.ownership.fences.values():
            assert term.number <= TERM_LIMIT  # the founder's own is one above the fence
        await world.stop()

    VirtualLoop().run(load())


@FIXED
@given(st.integers(0, 999_999))
def test_sums_of_sets_of_identities_still_fit_a_message(seed: int) -> None:
    """However many sets of any ranges are added up, each row has as many ranges as a message takes, and lacks none of
    the identities."""
    # Hypothesis would record each of a thousand draws.
    chance = random.Random(seed)
    typed = Typed(chance, IDS, small=1000)
    total, added = Applied(), Applied()
    for _ in range(4):
        ranges = [(low, low + typed.value(int) % 3) for low in chance.sample(range(0, 100_000, 4), 60)]
        part = Applied.of_rows([(IDS[0], 1, ranges)])
        added.merge(part)
        total.merge(part)
    decode(msgspec.msgpack.encode(total.rows()), moves.Identities)
    assert not added.without(total).rows()
