"""The number of shards of a run: by the model and the nodes waited for, kept by a checkpoint."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.encoding.frames import MAX_PAYLOAD_BYTES
from training.exchange import terms
from training.layout import is_partition, shard_bounds
from training.settings import ExchangeSettings
from training.shard_count import (
    MAX_SHARDS,
    MIN_SHARDS,
    SHARD_VALUES,
    SHARDS_PER_NODE,
    Partition,
    ShardChoice,
    ShardsFixed,
    choose,
    is_expected,
    outgrown,
    shard_count,
)


@pytest.mark.parametrize(
    ("values", "nodes", "expected"),
    [
        (0, 1, 64),  # named values
        (4_810, 1, 64),  # digits
        (101_770, 6, 64),  # mnist
        (25_000_000, 16, 64),
        (MIN_SHARDS * SHARD_VALUES, 1, 64),
        (MIN_SHARDS * SHARD_VALUES + 1, 1, 128),
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
    """Small models have 64, as ever; larger ones shards of 1 to 2 MiB; many nodes four each; never more than 4,096."""
    assert shard_count(values, nodes) == expected


@given(values=st.integers(0, 10**11), nodes=st.integers(1, 100_000))
def test_a_shard_is_a_frame_at_most_and_every_node_may_have_some(values: int, nodes: int) -> None:
    """Unless there would be more than 4,096 shards. Half as many would break one of the bounds."""

    def fits(count: int) -> bool:
        return -(-values // count) <= SHARD_VALUES and count >= SHARDS_PER_NODE * nodes

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


MILLION = 1_000_000


@pytest.mark.parametrize(
    ("setting", "stored", "expected"),
    [
        (0, None, ShardChoice(Partition(256), "model")),
        (8, None, ShardChoice(Partition(8), "setting")),
        (0, Partition(256), ShardChoice(Partition(256), "earlier")),
        (0, Partition(64), ShardChoice(Partition(64), "earlier")),  # of an earlier version, whose default it was
        (0, Partition(128, 2), ShardChoice(Partition(128, 2), "earlier")),
        (64, Partition(64), ShardChoice(Partition(64), "setting")),
        (128, Partition(128, 2), ShardChoice(Partition(128, 2), "setting")),
        (64, Partition(128, 2), ShardChoice(Partition(128, 2), "earlier")),  # it had so many before
        (192, Partition(64), ShardChoice(Partition(192, 3), "setting")),  # divided
        (4096, Partition(128, 2), ShardChoice(Partition(4096, 64), "setting")),
    ],
)
def test_a_run_keeps_its_shards_or_divides_them(setting: int, stored: Partition | None, expected: ShardChoice) -> None:
    """What is stored decides, then the setting, then the model. A multiple of what is stored divides it."""
    assert choose(124 * MILLION, setting, stored) == expected


@pytest.mark.parametrize(
    ("values", "setting", "stored"),
    [
        (124 * MILLION, 96, Partition(64)),
        (124 * MILLION, 64, Partition(128)),
        (124 * MILLION, 64, Partition(192, 2)),
        (100, 128, Partition(64)),  # a slice of one value has no two parts
        (0, 128, Partition(64)),  # named values
    ],
)
def test_any_other_number_than_the_stored_one_is_refused(values: int, setting: int, stored: Partition) -> None:
    """The error names both."""
    with pytest.raises(ShardsFixed, match=rf"exchange\.shards = {setting}, .* has {stored.shards} shards"):
        choose(values, setting, stored)


@pytest.mark.parametrize("setting", [0, 64, 128])
@pytest.mark.parametrize("values", [3, 63])
def test_a_vector_shorter_than_its_shards_keeps_their_number(values: int, setting: int) -> None:
    """Its checkpoint has one shard per value, which is what the number gives, and its record the number: nothing
    differs."""
    number = setting or MIN_SHARDS

    for stored in (len(shard_bounds(values, number)), number):
        assert choose(values, setting, Partition(stored)).partition == Partition(number)


@given(first=st.integers(1, 64), parts=st.integers(1, 8), factor=st.integers(1, 8), other=st.integers(1, 8))
def test_a_division_says_into_how_many_parts(first: int, parts: int, factor: int, other: int) -> None:
    """Only of shards that the run had: as many shards by another way are another partition."""
    stored, into = Partition(first * parts, parts), Partition(first * parts * factor, parts * factor)

    assert stored.divisor(into) == factor
    assert stored.divisor(Partition(into.shards, other)) == (factor if other == into.parts else 0)
    assert into.divisor(stored) == (1 if factor == 1 else 0)


@pytest.mark.parametrize(
    ("present", "values", "nodes", "expected"),
    [
        (Partition(64), 124 * MILLION, 32, None),
        (Partition(64), 124 * MILLION, 33, Partition(256, 4)),  # four per node again
        (Partition(256, 4), 124 * MILLION, 128, None),
        (Partition(256, 4), 124 * MILLION, 129, Partition(1024, 16)),
        (Partition(48, 3), 124 * MILLION, 40, Partition(192, 12)),
        (Partition(2048), 1000 * MILLION, 5000, Partition(4096, 2)),
        (Partition(4096), 1000 * MILLION, 5000, None),  # no more than the messages carry
        (Partition(64), 64 * 3 * 4096, 1000, Partition(128, 2)),  # no part has less than a block
        (Partition(64), 64 * 4097, 1000, None),
        (Partition(64), 16, 1000, None),
        (Partition(64), 0, 1000, None),  # named values
    ],
)
def test_a_swarm_outgrows_its_shards(present: Partition, values: int, nodes: int, expected: Partition | None) -> None:
    """With fewer than two for each node they are divided until there are four, as far as that goes."""
    assert outgrown(present, values, nodes) == expected


@given(
    nodes=st.integers(1, 5000), others=st.integers(1, 5000), values=st.integers(1, 10**9), first=st.integers(1, 4096)
)
def test_of_two_divisions_one_is_a_division_of_the_other(nodes: int, others: int, values: int, first: int) -> None:
    """Whatever two nodes think of how many nodes there are: so it does not matter who divides first."""
    found = [outgrown(Partition(first), values, count) for count in (nodes, others)]
    smaller, larger = sorted(one or Partition(first) for one in found)

    assert smaller.divisor(larger)
    for one in found:
        assert one is None or is_partition(values, *one)


def test_one_member_is_believed_of_four_times_what_this_node_would_choose() -> None:
    """Estimates of the same swarm differ by less. With one other node there is nobody else to ask."""
    for nodes in (3, 5, 40, 500):
        wanted = outgrown(Partition(1), 1 << 40, nodes)
        assert wanted is not None
        assert is_expected(2 * wanted.shards, nodes)
        assert not is_expected(2 * max(MIN_SHARDS, 16 * nodes), nodes)
    assert is_expected(64, 3)
    assert is_expected(4096, 2)
