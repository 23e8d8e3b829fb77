"""The node's settings on the object that `attach` returns."""

from __future__ import annotations

import pytest

from p2pnode.training.trainer.script_surface import ScriptSettings
from p2pnode.training.trainer_link.interface import TrainerFailed
from p2pnode.training.trainer_link.messages import Start, derive_start_seed


def start(device: str) -> Start:
    return Start("", "/data", {"part": 2}, device, 0, seed=3, node_seed=7, local_steps=4, start_seed=11)


def test_a_script_sees_the_settings_of_its_node() -> None:
    """The seed is that of this start, not the run's."""
    assert ScriptSettings.of(start("cpu")) == ScriptSettings(11, "cpu", "/data", {"part": 2})


def test_a_device_that_the_machine_has_not_is_named() -> None:
    """Otherwise the script would fail at its first tensor, without the name of the setting."""
    with pytest.raises(TrainerFailed, match=r'training\.device = "cuda:99"'):
        ScriptSettings.of(start("cuda:99"))


def test_every_node_and_every_start_has_a_seed_of_its_own() -> None:
    """The same four numbers give the same seed; any other gives another."""
    seeds = {
        derive_start_seed(seed, node, incarnation, starts)
        for seed in (0, 1)
        for node in (b"a" * 20, b"b" * 20)
        for incarnation in (1, 11)
        for starts in (1, 11)
    }

    assert len(seeds) == 16
    assert derive_start_seed(0, b"a" * 20, 1, 1) in seeds
    assert all(0 <= seed < 1 << 63 for seed in seeds)
