"""What a delta weighs, and when a node is behind."""

from __future__ import annotations

import pytest

from p2pnode.training.encoding.table import CodecName
from p2pnode.training.step_rules import delta_weight, fell_behind, pushed_weight, sharers, was_away


@pytest.mark.parametrize(
    ("kind", "workers", "samples", "theirs", "weight"),
    [
        ("sum", 4.0, 64, [64], 1.0),
        ("population", 4.0, 64, [1], 0.25),
        ("population", 0.5, 64, [], 1.0),
        ("samples", 4.0, 0, [64], 0.25),
        ("samples", 4.0, 64, [64, 0, -1], 0.25),
        ("samples", 4.0, 64, [192], 0.25 * 0.5),
        ("samples", 4.0, 64, [10_000, 10_000], 0.25 * 0.25),
        ("samples", 2.0, 1_000_000, [1, 1, 1, 1, 1, 1, 1], 0.5 * 4.0),
    ],
)
def test_the_weight_of_a_delta(kind: str, workers: float, samples: int, theirs: list[int], weight: float) -> None:
    """A share of the workers, by samples between a quarter and four of it; what is not known does not count."""
    assert delta_weight(kind, workers, samples, theirs) == pytest.approx(weight)


@pytest.mark.parametrize(
    ("workers", "training", "ended", "nodes"),
    [(1.0, 1, 2, 3.0), (2.0, 2, 1, 3.0), (3.0, 3, 0, 3.0), (300.0, 20, 10, 450.0), (1.0, 0, 1, 2.0)],
)
def test_a_step_is_shared_with_those_that_have_ended_with_it(
    workers: float, training: int, ended: int, nodes: float
) -> None:
    """Where all are known they are counted; in a large swarm those known stand for all."""
    assert sharers(workers, training, ended) == nodes


@pytest.mark.parametrize(
    ("completed", "base_step", "former_base", "limit", "behind"),
    [
        (20, 26, 20, 10, True),
        (20, 25, 20, 10, False),  # it makes them up
        (40, 31, 20, 10, False),  # it is ahead all the same
        (20, 500, 20, None, False),  # under asp nothing is late
    ],
)
def test_a_node_is_behind_by_half_of_what_makes_a_delta_late(
    completed: int, base_step: int, former_base: int, limit: int | None, behind: bool
) -> None:
    """So many steps of the others since the values it trains on, and none of them its own."""
    assert fell_behind(completed, base_step, former_base, limit) is behind


@pytest.mark.parametrize(
    ("completed", "base_step", "awaited_from", "limit", "behind"),
    [
        (20, 25, 21, 16, True),
        (21, 25, 21, 16, False),  # nobody waits for it
        (20, 25, None, 16, False),  # it was there all the time
        (26, 25, 27, 16, False),  # it is ahead all the same
        (20, 25, 21, None, False),
    ],
)
def test_a_node_that_was_away_is_behind_when_the_others_wait_for_it(
    completed: int, base_step: int, awaited_from: int | None, limit: int | None, behind: bool
) -> None:
    """Any lag beyond what their barriers allow, however few steps they made since its last look."""
    assert fell_behind(completed, base_step, base_step - 1, limit, awaited_from) is behind


@pytest.mark.parametrize(
    ("idle_s", "step_seconds", "away"), [(10.0, 1.0, False), (10.1, 1.0, True), (39.0, 10.0, False), (41.0, 10.0, True)]
)
def test_a_node_was_away_when_others_have_stopped_waiting_for_it(
    idle_s: float, step_seconds: float, away: bool
) -> None:
    """Ten seconds without progress, or four of its own steps where these are longer."""
    assert was_away(idle_s, step_seconds) is away


@pytest.mark.parametrize(
    ("weight", "codec", "synchronous", "pushed"),
    [
        (0.25, "sparse", False, 0.5),
        (0.8, "sparse", False, 1.0),  # never more than the delta itself
        (1.2, "sparse", False, 1.2),
        (0.25, "sparse", True, 0.25),
        (0.25, "int4", False, 0.25),  # its rate is that of the outer rule
    ],
)
def test_a_sparse_delta_weighs_by_its_rate(weight: float, codec: CodecName, synchronous: bool, pushed: float) -> None:
    """The rate times its share, up to 1; not under bsp, and no other codec."""
    assert pushed_weight(weight, codec, 2.0, synchronous=synchronous) == pytest.approx(pushed)
