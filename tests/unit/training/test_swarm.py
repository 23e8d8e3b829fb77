"""The protocol of what training requires of the overlay, and its implementations."""

from __future__ import annotations

import inspect
from typing import Any

from p2pnode.training.swarm import Swarm
from tests.harness.stubs.exchange_context import ScriptedSwarm

MEMBERS = [name for name in vars(Swarm) if not name.startswith("_")]


def test_the_scripted_swarm_of_the_tests_has_what_the_exchange_asks() -> None:
    """Sampling, population and announcements are for barriers and the step loop, lookups for data dispatch: the
    exchange does without."""
    barriers = {"population", "query_steps", "announce", "lookup"} | {
        "draw",
        "everyone",
        "sample",
        "all_members",
    }
    swarm: Any = ScriptedSwarm.__init__
    assigned = inspect.getsource(swarm)
    missing = [name for name in MEMBERS if not hasattr(ScriptedSwarm, name) and f"self.{name}" not in assigned]
    assert set(missing) <= barriers
