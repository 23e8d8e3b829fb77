"""The number of shards of a run: by the model and the nodes waited for, kept by a checkpoint."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pnode.training.encoding.frames import MAX_PAYLOAD_BYTES
from p2pnode.training.exchange import terms
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
