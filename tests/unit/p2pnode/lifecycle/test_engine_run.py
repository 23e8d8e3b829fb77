"""The barrier of a run with an engine. Nodes with an engine, from their join to their end: tests/simulated/
test_peer_engine.py and test_values.py."""

from __future__ import annotations

import pytest

from p2pnode.errors import ExitCode, UserError
from p2pnode.lifecycle.engine_run import barrier_of
from p2pnode.training.settings import BarrierSettings
from p2pnode.training.trainer_link.engine_messages import EngineOpened

SETTINGS = BarrierSettings(method="pssp", staleness=7, sample=3)


def test_the_barrier_is_that_of_the_settings_unless_the_script_names_one() -> None:
    """Then method, staleness and sample are the script's, and the rest stays."""
    assert barrier_of(SETTINGS, EngineOpened("p2p", 1)) is SETTINGS
    assert barrier_of(SETTINGS, EngineOpened("p2p", 1, "ssp", 2, 0)) == BarrierSettings(
        method="ssp", staleness=2, sample=0
    )


def test_a_barrier_that_does_not_exist_is_an_error_of_the_settings() -> None:
    """It says which."""
    with pytest.raises(UserError, match=r"the engine's barrier cannot be used: .*'xsp'") as failed:
        barrier_of(SETTINGS, EngineOpened("p2p", 1, "xsp"))
    assert failed.value.exit_code == ExitCode.CONFIGURATION
