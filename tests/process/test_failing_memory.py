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
def test_the_shards_of_a_daemon_whose_memory_fails_go_to_their_backups(tmp_path: Path) -> None:
    """The values of all shards of one daemon are overwritten while it trains: each has another owner within
    seconds, nobody is left out, and all train on."""
    with odd_swarm(tmp_path) as swarm:
        swarm.start(3)
        time.sleep(30.0)  # a young swarm still moves its shards, and its founder takes nothing over
        broken = next(node for node in swarm.nodes if (status(node) or {})["exchange"]["shards_owned"])
        swarm.signal(broken, signal.SIGUSR2)
        time.sleep(8.0)
        found = (status(broken) or {})["exchange"]
        events = swarm.events(broken, "shard_resigned")
        assert 1 <= len(events) <= SHARDS, described(status(broken) or {})
        assert found["shards_resigned"] == len(events)
        owned = [(status(node) or {})["exchange"]["shards_owned"] for node in swarm.nodes]
        assert sum(owned) == SHARDS, owned
        time.sleep(5.0)
        assert swarm.rate(swarm.nodes, 5.0) > 0.5
        assert not [node for node in swarm.nodes if (status(node) or {})["members_quarantined"]]
