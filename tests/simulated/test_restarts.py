"""Five nodes are killed at once and start again in any order: what is lost is reported, and nothing else is lost."""

from __future__ import annotations

import pytest

from tests.harness.restarts import NODES, SHARDS, restart


@pytest.mark.parametrize("restarts", [((1, 30.0), (2, 30.0)), ((3, 30.0), (34, 60.0))])
def test_what_a_restart_loses_was_on_no_two_disks_and_is_reported(restarts: tuple[tuple[int, float], ...]) -> None:
    """The values say what is lost. Two disks had none of it; the log has all of it, and at most the step that each node
    was pushing when it was killed beside it. No delta is in a value twice."""
    lost = 0
    for seed, spread_s in restarts:
        found = restart(seed, spread_s=spread_s, checkpoint_s=6.0)
        print(found)
        assert (found.unreported, found.lost_from_two_disks, found.doubled) == (0, 0, 0)
        assert found.lost <= found.reported <= found.lost + NODES * SHARDS
        lost += found.lost
    assert lost > 0
