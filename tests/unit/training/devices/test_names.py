"""The setting `training.device`."""

from __future__ import annotations

import pytest

from p2pnode.training.devices.names import named_devices, resolved_devices, threads_each


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("auto", ["auto"]),
        (["all"], ["all"]),
        ("cpu*3", ["cpu"] * 3),
        ("cpu * 2", ["cpu"] * 2),
        ("cuda:0,cuda:1", ["cuda:0", "cuda:1"]),
        (["cuda:0", "cpu*2"], ["cuda:0", "cpu", "cpu"]),
    ],
)
def test_devices_are_read_as_list_or_text(setting: str | list[str], expected: list[str]) -> None:
    """A list, a text with commas and a count give one name per trainer."""
    assert named_devices(setting) == expected


@pytest.mark.parametrize("setting", [[], "", "cpu*0", "0", "gpu zero", ["all", "cpu"], "cpu*65", ["cuda:-1"], ","])
def test_a_setting_without_devices_is_refused(setting: str | list[str]) -> None:
    """An empty list, a number and a slip say what is wrong."""
    with pytest.raises(ValueError, match=r"device|list|all"):
        named_devices(setting)


def test_all_takes_every_gpu_and_else_one_trainer() -> None:
    """Three GPUs give three trainers; without one there is one trainer."""
    assert resolved_devices("all", lambda: 3) == ["cuda:0", "cuda:1", "cuda:2"]
    assert resolved_devices("all", lambda: 0) == ["auto"]
    assert resolved_devices("cuda:1", lambda: 3) == ["cuda:1"]


def test_threads_are_divided_among_the_trainers() -> None:
    """Several trainers share the threads that were set, or the cores; a single one has its own choice."""
    assert threads_each(0, 1, 16) == 0
    assert threads_each(3, 1, 16) == 3
    assert threads_each(0, 4, 16) == 4
    assert threads_each(6, 4, 16) == 1
    assert threads_each(0, 8, 2) == 1
