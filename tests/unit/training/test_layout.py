"""The vector's layout: its totals, its digest, and the cut into shards."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pnode.training.encoding.frames import MAX_PAYLOAD_BYTES
from p2pnode.training.exchange import terms
from p2pnode.training.layout import Layout, LayoutEntry, shard_bounds
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shard_count import (
    EVEN_SHARDS,
    LEAST_VALUES,
    MAX_SHARDS,
    MIN_SHARDS,
    SHARD_VALUES,
    SHARDS_PER_NODE,
    ShardChoice,
    ShardsFixed,
    choose,
    shard_count,
)


def layout_of(*entries: tuple[str, tuple[int, ...], str]) -> Layout:
    """Entries (name, shape, kind) laid out one after the other."""
    made, offset = [], 0
    for name, shape, kind in entries:
        size = 1
        for length in shape:
            size *= length
        made.append(LayoutEntry(name, shape, "float32", kind, offset, size))  # type: ignore[arg-type]
        offset += size
    return Layout(tuple(made))


LAYOUT = layout_of(("a.weight", (3, 4), "parameter"), ("b.scale", (), "parameter"), ("bn.mean", (4,), "buffer"))


def test_totals_count_values() -> None:
    """Parameters and buffers together make the vector; a scalar counts one."""
    assert LAYOUT.total == 17
    assert LAYOUT.parameter_total == 13


@pytest.mark.parametrize(
    "change",
    [
        {"name": "a.other"},
        {"shape": (4, 3)},
        {"dtype": "bfloat16"},
        {"kind": "buffer"},
        {"offset": 1},
        {"size": 11},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_of_an_entry_is_in_the_digest(change: dict[str, object]) -> None:
    """Two layouts with one digest are one layout: nothing about a tensor is left out."""
    entries = (msgspec.structs.replace(LAYOUT.entries[0], **change), *LAYOUT.entries[1:])

    assert Layout(entries).digest() != LAYOUT.digest()


def test_the_digest_survives_the_wire() -> None:
    """A layout that has travelled is equal and has the same digest; the golden value is protocol."""
    for codec in (msgspec.msgpack, msgspec.json):
        again = codec.decode(codec.encode(LAYOUT), type=Layout)
        assert again == LAYOUT
        assert again.digest() == LAYOUT.digest()
    assert LAYOUT.digest() == "4b3d715742aad84578cc9d451eb26b4785b1608acd0e512d0e63216269d6958b"


@pytest.mark.parametrize("total", [1, 2, 7, 63, 64, 65, 1000, 123_457])
@pytest.mark.parametrize("shards", [1, 2, 3, 64, 4096])
def test_shards_cover_the_vector_once_and_equally(total: int, shards: int) -> None:
    """No gap, no overlap, none empty, sizes within one of each other, the longer ones first."""
    bounds = shard_bounds(total, shards)
    sizes = [stop - start for start, stop in bounds]

    assert len(bounds) == min(shards, total)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == total
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_a_vector_shorter_than_the_shards_has_one_value_each() -> None:
    """Three values in 64 shards are three shards."""
    assert shard_bounds(3, 64) == [(0, 1), (1, 2), (2, 3)]


def test_a_run_without_a_model_has_empty_shards() -> None:
    """Its shards hold named values: as many as asked for, each of no values."""
    assert shard_bounds(0, 3) == [(0, 0)] * 3


def test_a_vector_of_negative_length_is_refused() -> None:
    """Bounds come from a manifest, which another node has written."""
    with pytest.raises(ValueError, match="-1"):
        shard_bounds(-1, 3)


@pytest.mark.parametrize("total", [0, 5])
def test_no_shards_are_refused(total: int) -> None:
    """0 is a setting, and never the number of a run."""
    with pytest.raises(ValueError, match="0 shards"):
        shard_bounds(total, 0)


# -- the number of shards of a run


@pytest.mark.parametrize(
    ("values", "nodes", "expected"),
    [
        (0, 1, 64),  # named values
        (4_810, 1, 16),  # digits
        (101_770, 4, 16),  # mnist
        (101_770, 6, 32),
        (500_000, 1, 32),
        (1_050_000, 1, 64),
        (25_000_000, 16, 64),
        (EVEN_SHARDS * SHARD_VALUES, 1, 64),
        (EVEN_SHARDS * SHARD_VALUES + 1, 1, 128),
        (124_000_000, 1, 256),
        (350_000_000, 1, 1024),
        (1_000_000_000, 1, 2048),
        (7_000_000_000, 1, 4096),
        (100_000, 17, 128),
        (100_000, 300, 2048),
        (0, 100_000, 4096),
    ],
)
def test_the_number_follows_the_model_and_the_nodes(values: int, nodes: int, expected: int) -> None:
    """Small models have 16 shards, of a million values on 64, and larger ones shards of 1 to 2 MiB; many nodes have
    four each; there are never more than 4,096."""
    assert shard_count(values, nodes) == expected


@given(values=st.integers(0, 10**11), nodes=st.integers(1, 100_000))
def test_a_shard_is_a_frame_at_most_and_every_node_may_have_some(values: int, nodes: int) -> None:
    """Unless there would be more than 4,096 shards. Half as many would break one of the bounds."""
    even = min(EVEN_SHARDS, values // LEAST_VALUES) if values else EVEN_SHARDS

    def fits(count: int) -> bool:
        return -(-values // count) <= SHARD_VALUES and count >= max(SHARDS_PER_NODE * nodes, even)

    count = shard_count(values, nodes)

    assert MIN_SHARDS <= count <= MAX_SHARDS
    assert count.bit_count() == 1
    assert fits(count) or count == MAX_SHARDS
    assert count == MIN_SHARDS or not fits(count // 2)


def test_the_limits_are_those_of_other_modules() -> None:
    """A shard in bfloat16 is one frame, the messages carry as many shards, and by default no number is given."""
    assert 2 * SHARD_VALUES == MAX_PAYLOAD_BYTES
    assert terms.MAX_SHARDS == MAX_SHARDS
    assert ExchangeSettings().shards == 0


@pytest.mark.parametrize(
    ("setting", "stored", "expected"),
    [
        (0, 0, ShardChoice(16, "model")),
        (128, 0, ShardChoice(128, "setting")),
        (0, 16, ShardChoice(16, "earlier")),
        (16, 16, ShardChoice(16, "setting")),
        (0, 64, ShardChoice(64, "earlier")),
    ],
)
def test_a_run_keeps_the_shards_that_it_was_founded_with(setting: int, stored: int, expected: ShardChoice) -> None:
    """A new one has those of the setting, or of the model."""
    assert choose(100_000, setting, stored) == expected


@pytest.mark.parametrize(("setting", "stored"), [(128, 64), (32, 64), (65, 64)])
def test_any_other_number_than_the_stored_one_is_refused(setting: int, stored: int) -> None:
    """More and fewer: the message has both."""
    with pytest.raises(ShardsFixed, match=f"{setting}, and this run has {stored} shards"):
        choose(100_000, setting, stored)
