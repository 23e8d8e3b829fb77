"""Values are encoded once per version, for all nodes that pull it."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from p2pnode.training.encoding import codecs
from p2pnode.training.exchange.owner import reads as module
from p2pnode.training.exchange.owner.reads import EncodingCache
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.shards.state import ShardState

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
