"""The node's settings on the object that `attach` returns."""

from __future__ import annotations

import pytest

from p2pnode.training.trainer.script_surface import ScriptSettings
from p2pnode.training.trainer_link.interface import TrainerFailed
from p2pnode.training.trainer_link.messages import Start


def start(device: str) -> Start:
    return Start("", "/data", {"part": 2}, device, 0, seed=3, node_seed=7, local_steps=4, start_seed=11)


def test_a_script_sees_the_settings_of_its_node() -> None:
    """The seed is that of this start, not the run's."""
    assert ScriptSettings.of(start("cpu")) == ScriptSettings(11, "cpu", "/data", {"part": 2})


def test_a_device_that_the_machine_has_not_is_named() -> None:
    """Otherwise the script would fail at its first tensor, without the name of the setting."""
    with pytest.raises(TrainerFailed, match=r'training\.device = "cuda:99"'):
        ScriptSettings.of(start("cuda:99"))
