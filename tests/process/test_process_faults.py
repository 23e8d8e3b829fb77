"""Six real daemons under a few faults; `python -m benchmarks process_faults` plays more of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.process_faults import BOUND_S, Story
from tests.process.harness.swarm_world import START_S

SEED = 3


@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_survivor_stands_still_and_all_learn_together(tmp_path: Path) -> None:
    """Four faults at random moments: no node is longer than the detection bound without a step, and none hangs. At the
    end every node has the model that none could train alone (seven of ten classes give at most 0.75)."""
    story = Story(tmp_path, SEED, print)
    try:
        result = story.play(rounds=4, round_s=8.0, calm_s=START_S, goal=0.9)
    finally:
        story.end()

    assert sum(result.faults.values()) == 4
    assert result.longest_s <= BOUND_S + result.own_lag_s
    assert len(result.accuracies) == 6
    assert min(result.accuracies) >= 0.9
