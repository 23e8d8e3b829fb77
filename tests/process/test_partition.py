"""Two halves of a swarm of real daemons that lose each other; `python -m benchmarks partition` cuts for 30 s."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.partition import BOUND_S, RATE_MBIT, SIDES, play
from tests.process.harness.lan_world import NotPermitted, lan


@pytest.mark.long
@pytest.mark.timeout(400)
def test_two_halves_go_on_and_become_one_model(tmp_path: Path) -> None:
    """The line between three and three is cut for 12 s: both sides continue within the detection bound, then there is
    one model again. All leave at one moment, and their disks have every step that was not refused, once."""
    try:
        with lan(SIDES, [RATE_MBIT] * len(SIDES)) as net:
            result = play(net, tmp_path, cut_s=12.0)
    except NotPermitted as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")

    print(result)
    assert result.longest_s <= BOUND_S + result.own_lag_s
    assert min(result.sides_steps) >= 1
    assert result.repaired > 0
    assert (result.lost, result.doubled, result.unaccounted) == (0, 0, 0)
