"""Named values under random faults: every acknowledged update is in its value once, and no update twice."""

from __future__ import annotations

import pytest

from tests.harness.histories.value_histories import play
from tests.harness.runner.long_run import more


@pytest.mark.parametrize("seed", [3, 21, *more(639)])
def test_every_update_counts_once_whatever_fails(seed: int) -> None:
    """Nodes crash, return, pause, part, join and leave; requests are lost, doubled and late. Prints nothing if all
    promises hold; the error names the seed."""
    history = play(seed)
    assert history.tally.acknowledged > 10
