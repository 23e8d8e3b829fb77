"""The closed form of docs/scale.md: the page, the busiest owner, and what limits a swarm."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.record import FIGURES, load
from p2pnode.lifecycle.memory_budget import budget
from p2pnode.overlay.discovery.placement import rank
from p2pnode.overlay.ids import key_id
from tests.harness.builders.peers import ids
from tests.harness.project.repository import ROOT
from tools.scale_page import (
    DELAY_S,
    MACHINE_BYTES,
    MBIT_BYTES_PER_S,
    REQUEST_END_S,
    ROUND_TRIPS,
    Case,
    busiest_share,
    need,
    owner_load,
    owners,
    requests,
    scale_page,
)


def test_the_page_is_what_the_command_writes() -> None:
    """`make generated` changes nothing."""
    text = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")

    assert scale_page(text) == text


@pytest.mark.parametrize(("nodes", "shards"), [(4, 64), (16, 64), (32, 128)])
def test_the_busiest_owner_has_what_placement_gives_it(nodes: int, shards: int) -> None:
    """The mean over forty swarms of the largest number of shards of one node is within a fifth of the formula's."""
    rng = random.Random(7)
    largest = []
    for seed in range(40):
        names = ids(nodes, seed)
        keys = [key_id(rng.randbytes(8)) for _ in range(shards)]
        first = [rank(key, names)[0] for key in keys]
        largest.append(max(map(first.count, set(first))))
    counted = sum(largest) / len(largest)
    print(f"{nodes} nodes, {shards} shards: {counted:.1f}, by the formula {busiest_share(shards, nodes) * shards:.1f}")

    assert busiest_share(shards, nodes) * shards == pytest.approx(counted, rel=0.2)


@pytest.mark.parametrize(("nodes", "shards"), [(300, 1024), (1000, 4096), (10_000, 4096)])
def test_owners_of_large_swarms_are_those_of_random_places(nodes: int, shards: int) -> None:
    """Over forty swarms: how many nodes own a shard, within a hundredth, and the most of one node, within a fifth."""
    rng = random.Random(nodes)
    swarms = [Counter(rng.randrange(nodes) for _ in range(shards)) for _ in range(40)]
    owning = sum(map(len, swarms)) / len(swarms)
    largest = sum(max(owned.values()) for owned in swarms) / len(swarms)
    print(f"{nodes} nodes, {shards} shards: {owning:.0f} owners, the most of one {largest:.1f}")

    assert owners(shards, nodes) == pytest.approx(owning, rel=0.01)
    assert busiest_share(shards, nodes) * shards == pytest.approx(largest, rel=0.2)


@pytest.mark.parametrize("nodes", [50, 150, 300])
def test_requests_are_those_of_real_exchanges(nodes: int) -> None:
    """The histories of `exchange_history` sent 0.9 to 1.35 times as many: with lookups, audits and what was lost."""
    name = f"{nodes} nodes, 256 shards: requests of a node per step"
    (figure,) = (one for one in load(FIGURES) if one.name == name)
    print(f"{nodes} nodes: {figure.median} recorded, {requests(256, nodes):.0f} by the formula")

    assert 0.9 < figure.median / requests(256, nodes) < 1.35


def test_an_owner_of_a_crowd_has_more_to_do_than_to_ask() -> None:
    """All others push to each owner, so what it answers grows with the nodes, and what it asks with the owners."""
    small, large = (owner_load(4096, nodes, 60.0) for nodes in (10_000, 100_000))

    assert small.requests == pytest.approx(2 * owners(4096, 10_000) + 4 * 9_999 + 2 * 9_999 + 4096, rel=0.001)
    assert large.requests > 5 * small.requests
    assert large.core == pytest.approx(large.requests * REQUEST_END_S / 60.0)


def test_a_node_alone_owns_all_and_a_crowd_at_least_a_shard_each() -> None:
    """The ends of the formula."""
    assert busiest_share(64, 1) == 1.0
    assert busiest_share(64, 64_000) >= 1 / 64


@given(
    parameters=st.integers(100_000, 10**10),
    nodes=st.integers(2, 1000),
    mbit=st.floats(1, 10_000),
    step_s=st.floats(1, 3600),
)
def test_the_busiest_owner_sends_no_less_than_the_mean(parameters: int, nodes: int, mbit: float, step_s: float) -> None:
    """Of every model, line and crowd."""
    found = need(Case(parameters, mbit * MBIT_BYTES_PER_S, nodes, step_s))

    assert found.busiest.up >= found.mean.up * 0.999


def test_the_first_limit_is_named() -> None:
    """A slow line, a machine too small, and a case in which all fits."""
    slow = need(Case(1_000_000_000, MBIT_BYTES_PER_S, 32, 300.0))
    large = need(Case(9_000_000_000, 1000 * MBIT_BYTES_PER_S, 4, 1200.0))
    fine = need(Case(124_000_000, 100 * MBIT_BYTES_PER_S, 32, 60.0))

    assert slow.breaks_first == "upload of the busiest owner"
    assert slow.steps == pytest.approx(slow.exchange_s / 300.0)
    assert slow.exchange_s == pytest.approx(slow.busiest.up / MBIT_BYTES_PER_S + 2 * ROUND_TRIPS * DELAY_S)
    assert large.breaks_first == "memory"
    assert large.memory_bytes > MACHINE_BYTES
    assert (fine.breaks_first, fine.steps) == ("–", 1.0)
    case = Case(124_000_000, 100 * MBIT_BYTES_PER_S, 32, 60.0)
    settings = msgspec.structs.replace(case.settings, codec=fine.codec)
    assert fine.memory_bytes == budget(124_000_000, settings, 32).total
