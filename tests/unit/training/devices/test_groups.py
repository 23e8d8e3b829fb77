"""Which trainers of a node merge by `torch.distributed`."""

from __future__ import annotations

import pytest

from p2pnode.training.devices.groups import DeviceGroups, backend_of


@pytest.mark.parametrize(
    ("setting", "names", "backend"),
    [
        ("auto", ["cuda:0", "cuda:1"], "nccl"),
        ("collective", ["cuda:0", "cuda:1"], "nccl"),
        ("memory", ["cuda:0", "cuda:1"], None),
        ("auto", ["cuda:0", "cuda:0"], None),
        ("collective", ["cuda:0", "cuda:0"], "gloo"),
        ("auto", ["cpu", "cpu"], None),
        ("collective", ["cpu", "cuda:0"], "gloo"),
        ("collective", ["cuda:0"], None),
    ],
)
def test_nccl_is_for_trainers_with_a_gpu_each(setting: str, names: list[str], backend: str | None) -> None:
    """NCCL refuses two members on one GPU: there, and on processors, trainers merge in shared memory unless told."""
    assert backend_of(setting, names) == backend


def test_other_members_and_a_failure_make_another_group() -> None:
    """While the members stay the same so does the group; its number and file are new otherwise."""
    groups = DeviceGroups("gloo", "/there/group", 3.0)
    first = groups.orders({0: 0.25, 1: 0.25, 2: 0.5})
    assert [one.weight for one in first.values()] == [0.25, 0.25, 0.5]
    assert [one.writes for one in first.values()] == [True, False, False]
    assert {(one.group, one.place, one.members) for one in first.values()} == {(1, "/there/group.1", (0, 1, 2))}
    assert groups.orders({0: 0.5, 1: 0.25, 2: 0.25})[0].group == 1
    without = groups.orders({1: 0.5, 2: 0.5})
    assert [(one.group, one.writes) for one in without.values()] == [(2, True), (2, False)]
    groups.failed()
    assert groups.orders({1: 0.5, 2: 0.5})[1].place == "/there/group.3"
    assert groups.alone(2).members == (2,)
