"""Rendezvous ranking of candidates."""

from __future__ import annotations

from overlay.discovery.placement import rank
from overlay.ids import key_id
from tests.harness.peers import ids


def test_a_leave_moves_only_its_own_share() -> None:
    """Without a node only its keys move; the shares are balanced."""
    nodes = ids(10)
    keys = [key_id(bytes([number // 256, number % 256])) for number in range(2000)]
    before = {key: rank(key, nodes)[0] for key in keys}
    after = {key: rank(key, nodes[1:])[0] for key in keys}
    shares = [sum(owner == node for owner in before.values()) for node in nodes]

    assert all(after[key] == before[key] for key in keys if before[key] != nodes[0])
    assert min(shares) > 140
    assert max(shares) < 260
    assert rank(keys[0], reversed(nodes)) == rank(keys[0], nodes)
