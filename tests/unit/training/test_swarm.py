"""The protocol of what training requires of the overlay, and its implementations."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from p2pnode.overlay.overlay import Overlay
from p2pnode.training.swarm import Swarm
from tests.harness.stubs.exchange_context import ScriptedSwarm

MEMBERS = [name for name in vars(Swarm) if not name.startswith("_")]
CALLS = [name for name in MEMBERS if inspect.isfunction(vars(Swarm)[name])]


@pytest.mark.parametrize("name", CALLS)
def test_the_overlay_takes_the_same_parameters(name: str) -> None:
    """Names, order and defaults are those of the protocol."""
    asked, given = (list(inspect.signature(getattr(one, name)).parameters.values()) for one in (Swarm, Overlay))
    assert [(one.name, one.kind, one.default) for one in asked] == [(one.name, one.kind, one.default) for one in given]


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
