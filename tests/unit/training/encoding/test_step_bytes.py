"""The bytes of a step in closed form; tests/simulated count them."""

from __future__ import annotations

import pytest

from p2pnode.training.encoding.step_bytes import StepShape, step_bytes


def test_what_a_swarm_sends_it_receives() -> None:
    """Over nodes with unequal shares, bytes up and down add up to the same."""
    shapes = [
        StepShape(1_000_000, 4, owned, backed) for owned, backed in ((0.5, 0.1), (0.3, 0.2), (0.2, 0.3), (0.0, 0.4))
    ]
    found = [step_bytes(shape, "sparse") for shape in shapes]

    # The last node owns nothing, and so does not forward; all shards of the others have backups.
    assert sum(each.pushed for each in found) == pytest.approx(sum(each.deltas_received for each in found))
    assert sum(each.served for each in found) == pytest.approx(sum(each.pulled for each in found))
    assert sum(each.forwarded for each in found) == pytest.approx(sum(each.forwards_received for each in found))


def test_a_node_alone_moves_nothing_and_one_without_backups_forwards_nothing() -> None:
    """The formula of tests/simulated/test_exchange_bytes.py: (2 + backups)·(N−1)/N models."""
    alone = step_bytes(StepShape.even(1000, 1), "bfloat16")
    assert (alone.up, alone.down) == (0.0, 0.0)
    for nodes in (2, 8, 32):
        for replicas in (0, 1):
            found = step_bytes(StepShape.even(1000, nodes, replicas=replicas), "bfloat16", "bfloat16")
            assert found.up / 2000 == pytest.approx((2 + replicas) * (nodes - 1) / nodes)
            assert found.down == pytest.approx(found.up)
