"""The requests of a large swarm with relays, counted over the tables of its nodes: the page, and the aims."""

from __future__ import annotations

import pytest

from tests.harness.project.repository import ROOT
from training.settings import ExchangeSettings
from training.simulation.relays import SPARSE_VALUES, Load, bytes_factor, load, table


@pytest.mark.long
def test_the_page_has_the_table_of_the_code() -> None:
    """docs/scale.md, *Requests*."""
    assert table() in (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("nodes", "shards"), [(300, 1200), (1000, 4000), (10_000, 4096)])
def test_few_requests_and_bytes_in_a_swarm_of_any_size(nodes: int, shards: int) -> None:
    """With the default digits no more than 64 requests per node and step for deltas and values, a small part of those
    without relays, and half as many bytes more with sparse deltas."""
    settings = ExchangeSettings()
    flat, relayed = load(nodes, shards, 0), load(nodes, shards, settings.relay_bits)

    assert settings.sparse_values == SPARSE_VALUES
    assert flat.for_values == flat.for_deltas >= 290
    assert relayed.for_deltas + relayed.for_values <= 64
    assert relayed.for_deltas <= flat.for_deltas / 10
    assert relayed.for_values <= flat.for_values / 10
    assert relayed.forwards <= flat.forwards / 10
    assert bytes_factor(relayed.transfers, "sparse", "int4") <= 1.5


def test_dense_deltas_of_a_thousand_nodes_take_half_as_many_bytes_more() -> None:
    """In digits of four bits, pushes and pulls in one codec: a delta is sent two and a half times, and forwarded and
    pulled once."""
    assert bytes_factor(load(1000, 4000, 4).transfers, "bfloat16", "bfloat16") <= 1.5
    assert bytes_factor(1.0, "bfloat16", "bfloat16") == 1.0


def test_one_request_to_each_owner_without_relays() -> None:
    """And a forward to each of the backups for each push."""
    found = load(40, 1, 0)

    assert found == Load(pytest.approx(39 / 40), 0.0, pytest.approx(39 / 40), pytest.approx(39 / 40), 1.0)
