"""The published value: every follower holds its bits, and it comes near the value of the shard."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.table import CHOICES, CodecName
from p2pnode.training.exchange.published import (
    KEPT_PART,
    MAX_CHANGES,
    ApproximatedState,
    Published,
    after,
    begin,
    digest_of,
    next_version,
)
from tests.harness.builders.stores import term

SIZE = 3000
CODECS: list[CodecName] = list(CHOICES)


def source(version: int) -> ApproximatedState:
    return ApproximatedState(term(1, "a"), version)


def values(seed: int, size: int = SIZE, scale: float = 1.0) -> Vector:
    return (scale * np.random.default_rng(seed).standard_normal(size)).astype(np.float32)


def entered(published: Published) -> tuple[Vector, bytes]:
    """What a follower holds that was sent the whole, in the codec that the owner names for it, and its digest."""
    return after(None, [(published.whole_codec, encoded(published))], published.value.size)


def encoded(published: Published) -> bytes:
    return bytes(codecs.encode(published.value, published.whole_codec))


@pytest.mark.parametrize("seed", range(8))
def test_all_who_follow_hold_the_same_bits(seed: int) -> None:
    """Twelve followers pull at random versions, one enters late, codecs change in between: whoever is up to date has
    the owner's published bits and their digest, whether it was sent changes or the whole."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    x = values(seed)
    published = begin(b"c" * 8, x, source(0))
    held: dict[int, tuple[int, Vector]] = {}
    sent = {"changes": 0, "whole": 0}
    for version in range(1, 60):
        x = x + values(1000 * seed + version, scale=0.01)
        if chance.random() < 0.8:
            published = next_version(published, x, source(version), chance.choice(CODECS))
        for follower in range(12):
            if chance.random() < (0.05 if follower == 0 else 0.5):
                position, value = held.get(follower, (-1, np.zeros(0, np.float32)))
                changes = published.since(position) if follower in held else None
                if changes is None:
                    value, digest = entered(published)
                else:
                    assert [one.version for one in changes] == list(range(position + 1, published.version + 1))
                    value, digest = after(value, [(one.codec, one.payload) for one in changes], value.size)
                sent["whole" if changes is None else "changes"] += 1
                held[follower] = published.version, value
                assert digest == published.digest
                assert value.tobytes() == published.value.tobytes()
    assert sent["changes"] > 100
    assert sent["whole"] >= 12


@pytest.mark.parametrize(
    ("codec", "share", "last"), [("bfloat16", 0.01, 1e-6), ("int8", 0.05, 1e-6), ("int4", 0.15, 1e-5)]
)
def test_what_is_rounded_off_comes_with_the_next_versions(codec: CodecName, share: float, last: float) -> None:
    """While x rests, |x − p| shrinks with every version by the precision of the codec, to a few units of float32."""
    x = values(3)
    published = begin(b"c" * 8, x, source(0))
    off = [float(np.abs(x - published.value).max())]
    for version in range(1, 6):
        published = next_version(published, x, source(version), codec)
        off.append(float(np.abs(x - published.value).max()))

    assert off[0] > 1e-3
    assert all(after < share * before or after < last for before, after in itertools.pairwise(off))
    assert off[-1] < last


def test_a_sparse_publication_brings_the_largest_differences_first() -> None:
    """Of 3,000 values at most 94 a version. What is left comes with the next ones, until p is near x everywhere."""
    x = values(3, scale=0.1)
    published = begin(b"c" * 8, np.zeros(SIZE, np.float32), source(0))
    off, sizes = [float(np.linalg.norm(x))], []
    for version in range(1, 200):
        published = next_version(published, x, source(version), "sparse")
        off.append(float(np.linalg.norm(x - published.value)))
        sizes.append(len(published.changes[-1].payload))

    assert all(after < before for before, after in itertools.pairwise(off[:100]))
    assert off[-1] < 0.05 * off[0]
    assert max(sizes) < 0.07 * SIZE
    assert len(published.changes) > 16


def test_a_publication_begins_in_bfloat16_and_goes_on_in_float32() -> None:
    """The whole has every bit of p in both, at two bytes per value in the beginning."""
    x = values(4)
    x[0] = -0.0
    first = begin(b"c" * 8, x, source(0))
    second = next_version(first, x, source(1), "int8")

    assert (first.whole_codec, second.whole_codec) == ("bfloat16", "float32")
    assert len(encoded(first)) == 2 * SIZE
    for published in (first, second):
        value, digest = entered(published)
        assert value.tobytes() == published.value.tobytes()
        assert digest == published.digest


def test_a_tick_leaves_the_former_value_as_it_was() -> None:
    """An answer that is still being sent has the bits that its head names."""
    x = values(5)
    first = begin(b"c" * 8, x, source(0))
    before = first.value.tobytes()
    next_version(first, x + 1, source(1), "int8")
    assert first.value.tobytes() == before
    assert digest_of(first.value) == first.digest


def test_changes_are_kept_while_they_cost_less_than_the_whole() -> None:
    """In half the whole is room for three of int4; who is further behind, or ahead, or nowhere, is sent the whole."""
    x = values(6)
    published = begin(b"c" * 8, x, source(0))
    for version in range(1, 9):
        published = next_version(published, x + version, source(version), "int4")

    assert [one.version for one in published.changes] == [6, 7, 8]
    assert published.change_bytes < KEPT_PART * published.value.nbytes
    assert published.since(8) == ()
    assert [one.version for one in published.since(6) or ()] == [7, 8]
    assert published.since(5) == published.changes
    assert published.since(4) is None
    assert published.since(9) is None
    assert published.source == source(8)


def test_the_last_change_is_kept_if_it_is_smaller_than_the_whole() -> None:
    """Of bfloat16 it takes half of it."""
    published = begin(b"c" * 8, values(6), source(0))
    for version in range(1, 4):
        published = next_version(published, values(6) + version, source(version), "bfloat16")
    assert [one.version for one in published.changes] == [3]


def test_a_change_that_is_no_smaller_than_the_whole_is_not_kept() -> None:
    """A shard of one value has changes of five bytes in int8: it is always sent whole."""
    published = next_version(begin(b"c" * 8, values(7, 1), source(0)), values(8, 1), source(1), "int8")
    assert published.changes == ()
    assert published.since(0) is None


def test_the_number_of_changes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small they are, so that a follower has a bounded amount of work."""
    monkeypatch.setattr("p2pnode.training.exchange.published.MAX_CHANGES", 2)
    published = begin(b"c" * 8, values(9), source(0))
    for version in range(1, 9):
        published = next_version(published, values(9), source(version), "int4")
    assert [one.version for one in published.changes] == [7, 8]
    assert MAX_CHANGES >= 16


@pytest.mark.parametrize("size", [0, 1, 2047, 2048, 2049, 7001])
def test_what_differs_in_any_bit_or_place_has_another_digest(size: int) -> None:
    """One bit of one value, two values exchanged, all shifted by one; equal values at another address have the same."""
    value = values(10, size)
    digest = digest_of(value)
    assert digest_of(np.concatenate([np.zeros(1, np.float32), value])[1:]) == digest
    changed = []
    for place in {0, size // 2, max(0, size - 1)} if size else ():
        for bit in (0, 31):
            other = value.copy()
            other.view(np.uint32)[place] ^= np.uint32(1 << bit)
            changed.append(other)
    for first, second in ((0, 1), (0, 2), (0, 2048), (1, size - 1)) if size > 2048 else ():
        other = value.copy()
        other[[first, second]] = value[[second, first]]
        changed.append(other)
    if size > 1:
        changed.append(np.roll(value, 1))
    assert all(digest_of(other) != digest for other in changed)
    assert len(changed) >= min(size, 2)


def test_a_payload_of_another_size_is_refused() -> None:
    """Nothing is applied."""
    with pytest.raises(ValueError, match="are not"):
        after(values(11), [("int8", b"\0" * 10)], SIZE)
