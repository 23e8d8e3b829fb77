"""Five nodes are killed at once and start again in any order: each shard goes on from its highest copy."""

from __future__ import annotations

import pytest

from tests.harness.histories.restarts import restart
from tests.harness.runner.long_run import more


@pytest.mark.parametrize(
    "restarts",
    [((1, 10.0, 6.0),), *more((((2, 10.0, 6.0), (3, 10.0, 6.0), (34, 10.0, 6.0)),), (((2079, 10.0, 10.0),),))],
)
@pytest.mark.promise(6)
def test_a_restart_goes_on_from_the_highest_copies_and_reports_what_they_lack(
    restarts: tuple[tuple[int, float, float], ...],
) -> None:
    """All come in time. The values say what is lost: no disk had more of a shard; and what the shards lack of the steps
    that the disks show is counted. No delta is in a value twice."""
    lost = 0
    for seed, spread_s, checkpoint_s in restarts:
        found = restart(seed, spread_s=spread_s, checkpoint_s=checkpoint_s)
        print(found)
        assert (found.lost_from_the_highest, found.doubled) == (0, 0)
        assert found.lost_from_disks <= found.reported
        lost += found.lost
    assert lost > 0
