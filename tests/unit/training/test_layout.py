"""The vector's layout: its totals, its digest, and the cut into shards."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from p2pnode.training.layout import Layout, LayoutEntry, shard_bounds


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
