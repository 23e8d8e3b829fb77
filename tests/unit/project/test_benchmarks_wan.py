"""What the benchmark `wan` makes of notes, rows and logs, and how it reads its ways."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import wan_window
from benchmarks.wan_trainer import Ages
from p2pnode.training.layout import shard_bounds

#: Two turns of 8 s with 2 s between them, and one that ends after the measured time.
NOTES = [
    {"step": 1, "began_s": 0.0, "ended_s": 8.0, "oldest": 1, "age": 0.5},
    {"step": 2, "began_s": 10.0, "ended_s": 18.0, "oldest": 3, "age": 1.5},
    {"step": 3, "began_s": 20.0, "ended_s": 28.0, "oldest": 2, "age": 1.0},
]


def test_only_training_inside_the_measured_time_counts() -> None:
    """From 4 to 24 s there are 4, 8 and 4 seconds of training, and two steps."""
    assert wan_window.training_share(NOTES, 4.0, 24.0) == pytest.approx(16 / 20)
    assert wan_window.steps_made(NOTES, 4.0, 24.0) == pytest.approx(2.0)
    assert wan_window.training_share(NOTES, 30.0, 40.0) == 0.0


def test_a_node_has_means_per_step_and_the_events_of_its_log() -> None:
    """Counts of rows are divided by the steps, refusals summed over their reasons, and only warnings counted."""
    rows = [
        {"step": 1, "outstanding": 4, "refused": {}, "pull_missing": 0, "pulled": 64, "push_seconds": 1.0},
        {"step": 2, "outstanding": 0, "refused": {"stale": 2, "late": 1}, "pull_missing": 6, "pulled": 58},
    ]
    entries = [("warning", "push_unfinished"), ("info", "joined"), ("debug", "step"), ("debug", "peer_suspect")]
    entries += [("error", "trainer_failed")]
    log = "\n".join(json.dumps({"level": level, "event": event}) for level, event in entries)

    found = wan_window.node(
        NOTES, rows, began_s=4.0, ended_s=24.0, sent_bytes=10_000_000, log=f"not json\n{log}\n{log}", left=1, lost=2
    )

    assert (found.unacknowledged, found.refused, found.missing, found.pulled) == (2.0, 1.5, 3.0, 61.0)
    assert (found.oldest, found.age, found.left, found.lost) == (3, 1.25, 1, 2)
    assert found.sent_per_step == pytest.approx(5.0)
    assert found.warnings == {"push_unfinished": 2, "peer_suspect": 2, "trainer_failed": 2}
    assert found.phases_s["push"] == 1.0
    assert found.share == found.share_from_start == pytest.approx(0.8)
    since = wan_window.node(NOTES, rows, began_s=14.0, ended_s=24.0, started_s=0.0, sent_bytes=0)
    assert (since.share, since.share_from_start) == pytest.approx((0.8, 20 / 24))


def test_a_swarm_is_settled_where_each_shard_has_an_owner_with_a_backup() -> None:
    """A copy that a former backup still has does not matter."""
    nodes = [{"shards": 4, "shards_owned": owned, "shards_backed": 4, "shards_without_backup": 0} for owned in (3, 1)]
    assert wan_window.is_settled(nodes)
    assert not wan_window.is_settled([nodes[0], {**nodes[1], "shards_without_backup": 1}])
    assert not wan_window.is_settled([nodes[0], {**nodes[1], "shards_owned": 0}])
    assert not wan_window.is_settled([nodes[0], {"shards_without_backup": 0}])


def test_ages_are_turns_since_a_shard_changed() -> None:
    """A shard that changes in a thirtieth of its values is new; the others are a turn older."""
    vector = np.zeros(200_000, np.float32)
    ages = Ages(vector, 4)
    ages.look()
    assert ages.turns == [1, 1, 1, 1]
    start, stop = shard_bounds(len(vector), 4)[2]
    random = np.random.default_rng(5)
    for turn in range(2, 12):
        vector[start + random.choice(stop - start, (stop - start) // 30, replace=False)] = turn
        ages.look()
        assert ages.turns == [turn, turn, 0, turn]
    ages.look()
    assert ages.turns == [12, 12, 1, 12]
