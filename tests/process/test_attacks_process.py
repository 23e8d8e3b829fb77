"""Some attacks of one member (`tests.harness.attacks`) on real daemons, over sockets; and memory that fails."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from statistics import median

import pytest

from benchmarks.daemons import status, wait_until
from tests.harness.attacks.member_attacks import ATTACKS
from tests.process.harness.head_attacks import HEAD_ATTACKS
from tests.process.harness.odd_swarm import SHARDS, described, odd_swarm

#: What the others still do while the attack lasts, from its sixteenth second on, and when its member has gone. Lower
#: than in simulated swarms: the machine of a test does other things.
RATE, RATE_AFTER = 0.6, 0.6
BEFORE_S, FIRST_S, MEASURED_S = 8.0, 15.0, 10.0
SAMPLE = [
    "announces that it trains, and never moves",
    "announces step 10⁹",
    "announces the last step that a message takes",
    "pushes ±3·10³⁸",
    "repairs with ±3·10³⁸",
    "claims every shard under a term of 2⁶²",
    "claims every shard for another node, twice a second",
    "has seen terms of 2⁶²",
    "serves NaN to all that pull",
    "sends requests of every kind with any values",
]


@pytest.mark.rates
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SAMPLE)
def test_real_daemons_withstand_an_attack_and_start_again(tmp_path: Path, name: str) -> None:
    """Three honest daemons and one that attacks: they go on while it lasts, and when it has gone; nothing of it is in
    their steps or values. Killed and started again they train on."""
    assert name in ATTACKS
    with odd_swarm(tmp_path) as swarm:
        swarm.start(4, name)
        honest, attacker = swarm.nodes[:3], swarm.nodes[3]
        usual = swarm.rate(honest, BEFORE_S)
        swarm.signal(attacker, signal.SIGUSR1)
        time.sleep(FIRST_S)
        during = swarm.rate(honest, MEASURED_S)
        swarm.end(attacker)
        time.sleep(5.0)
        after = swarm.rate(honest, MEASURED_S)
        states = [status(node) or {} for node in honest]
        print(f"{name}: {usual:.2f} steps a second before, {during:.2f} during, {after:.2f} after")
        assert during >= RATE * usual, [described(one) for one in states]
        assert after >= RATE_AFTER * usual, [described(one) for one in states]
        most = max(int(one["step"]) for one in states)
        assert most < 40 * (FIRST_S + 2 * MEASURED_S + BEFORE_S), most
        assert not [one for one in states if one["exchange"]["shards_to_mend"]]
        again = swarm.start_again(honest)
        assert median(int(one["step"]) for one in again) < 2 * most + 100


@pytest.mark.rates
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", list(HEAD_ATTACKS))
def test_large_heads_and_many_requests_leave_nothing_behind(tmp_path: Path, name: str) -> None:
    """One member takes as much as it gets. What it costs the others meanwhile is printed; once it has
    gone they make their steps again."""
    with odd_swarm(tmp_path) as swarm:
        swarm.start(4, name)
        honest, attacker = swarm.nodes[:3], swarm.nodes[3]
        usual = swarm.rate(honest, BEFORE_S)
        swarm.signal(attacker, signal.SIGUSR1)
        time.sleep(FIRST_S)
        during = swarm.rate(honest, MEASURED_S)
        swarm.end(attacker)
        time.sleep(5.0)
        after = swarm.rate(honest, MEASURED_S)
        asked = [wait_until(node, lambda found: "loop" in found, what="status", within_s=20.0) for node in honest]
        late_ms = [one["loop"]["delay_ms_max"] for one in asked]
        print(f"{name}: {usual:.2f} steps a second before, {during:.2f} during, {after:.2f} after; {late_ms} ms late")
        assert after >= RATE_AFTER * usual, [described(one) for one in asked]
        assert not [one for one in asked if one["exchange"]["shards_to_mend"] or one["members_distrusted"]]


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
