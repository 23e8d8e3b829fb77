"""How long a node of a simulated swarm goes without a whole exchange: acknowledged deltas and fresh values, not steps.

A node counts steps while its deltas wait in the outbox and its pulls bring nothing. Here a step counts if every shard
of its delta was acknowledged, every shard was pulled, and every shard of the replica has other bits than at the last
step that counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2pnode.training.trainer_link.interface import Vector
from tests.harness.swarms.swarm import Host, Swarm


@dataclass
class _Seen:
    step: int
    since_s: float
    replica: Vector


class Standing:
    """`longest_s`: the longest time that any running node went without a whole exchange."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self.longest_s = 0.0
        now = swarm.clock.monotonic()
        self._seen = {host.name: _Seen(_whole_step(host), now, _replica(host)) for host in swarm.running()}

    def look(self) -> None:
        """Call it often: a time is noted when it is seen."""
        now = self._swarm.clock.monotonic()
        for host in self._swarm.running():
            seen, step, replica = self._seen[host.name], _whole_step(host), _replica(host)
            bounds = host.exchange.store.bounds
            is_fresh = all((replica[start:stop] != seen.replica[start:stop]).any() for start, stop in bounds)
            self.longest_s = max(self.longest_s, now - seen.since_s)
            if step > seen.step and is_fresh:
                self._seen[host.name] = _Seen(step, now, replica)


def _replica(host: Host) -> Vector:
    return host.exchange.replica.vector.copy()


def _whole_step(host: Host) -> int:
    """The last step of which every shard was acknowledged and pulled."""
    rows = [row for row in host.living.progress.steps if not (row.get("outstanding", 1) or row["refused"])]
    return max((row["step"] for row in rows if not row.get("pull_missing", 1)), default=0)
