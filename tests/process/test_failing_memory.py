"""Memory that fails in a real daemon."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from benchmarks.daemons import status
from tests.process.harness.odd_swarm import SHARDS, described, odd_swarm


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_daemon_whose_memory_fails_goes_on_with_its_last_good_copies(tmp_path: Path) -> None:
    """The values of all shards of one daemon are overwritten while it trains: each is repaired within seconds, no delta
    is lost, nobody is left out, and all train on."""
    with odd_swarm(tmp_path) as swarm:
        swarm.start(3)
        time.sleep(10.0)  # a young swarm still moves its shards
        broken = next(node for node in swarm.nodes if (status(node) or {})["exchange"]["shards_owned"])
        swarm.signal(broken, signal.SIGUSR2)
        time.sleep(8.0)
        found = (status(broken) or {})["exchange"]
        events = swarm.events(broken, "shard_broken"), swarm.events(broken, "shard_repaired")
        assert 1 <= len(events[0]) <= SHARDS, described(status(broken) or {})
        assert [one["shard"] for one in events[1]] == [one["shard"] for one in events[0]], events
        assert {one["source"] for one in events[1]} <= {"backup", "replica"}
        assert (found["shards_repaired"], found["lost_in_repairs"]) == (len(events[0]), 0)
        time.sleep(5.0)
        assert swarm.rate(swarm.nodes, 5.0) > 0.5
        assert not [node for node in swarm.nodes if (status(node) or {})["members_distrusted"]]
