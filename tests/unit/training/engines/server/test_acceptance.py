"""The acceptance policies: which updates count, and together with which."""

import numpy as np
import pytest

from p2pnode.training.engines.server.acceptance import (
    Contribution,
    EachAtOnce,
    NotWeighable,
    Quota,
    ServerOptions,
    WholeStep,
    updates_of,
)


def one(worker: bytes, version: int = 0, *, task: int = 1, step: int = 1, update=1.0) -> Contribution:
    return Contribution(worker, task, 1, step, version, [("w", update)])


def test_a_tolerance_takes_so_many_older_versions():
    """`version_tolerance` 2 accepts what was computed two versions before, nothing older, and no version to come."""
    quota = Quota(4, 2)
    assert [quota.judge(one(bytes([age]), 9 - age), 9) for age in range(4)] == ["accepted"] * 3 + ["stale"]
    assert quota.judge(one(b"later", 10), 9) == "stale"
    assert [Quota(2).judge(one(b"a", version), 9) for version in (8, 9)] == ["stale", "accepted"]


def test_a_quota_is_averaged_to_one_update():
    """`grads_to_wait` updates make one, their mean; the values of a key that only some have are divided as well."""
    quota = Quota(2)
    quota.judge(Contribution(b"a", 1, 1, 1, 3, [("w", np.float32([2, 4])), ("only", 6.0)]), 3)
    quota.judge(Contribution(b"b", 2, 1, 1, 3, [("w", np.float32([4, 8]))]), 3)
    commit = quota.due(3, [], 0)
    found = {each.key: each for each in updates_of(commit)}
    assert commit.version == 4
    assert found["w"].value.tolist() == [3.0, 6.0]
    assert found["w"].value.dtype == np.float32
    assert found["only"].value == 3.0
    assert {each.timestamp for each in found.values()} == {4}
    assert quota._held == []


@pytest.mark.parametrize("update", ["text", [1.0], True, None])
def test_only_numbers_can_be_averaged(update):
    """An update that is no number and no array is an error that names key and worker."""
    quota = Quota(2)
    for worker in (b"a" * 20, b"b" * 20):
        quota.judge(one(worker, update=update), 0)
    with pytest.raises(NotWeighable, match=r"'w' by 61616161"):
        updates_of(quota.due(0, [], 0))


def test_arrays_of_different_shapes_cannot_be_averaged():
    """The error names the worker whose update does not fit."""
    quota = Quota(2)
    quota.judge(one(b"a" * 20, update=np.ones(2)), 0)
    quota.judge(one(b"b" * 20, update=np.ones(3)), 0)
    with pytest.raises(NotWeighable, match="62626262"):
        updates_of(quota.due(0, [], 0))


def test_asynchronous_updates_count_at_once_and_unchanged():
    """Each is an update of its own, of any type, with a version of its own."""
    policy = EachAtOnce()
    policy.judge(one(b"a", 0, update=["x"]), 7)
    policy.judge(one(b"a", 0, update=["y"], task=2), 7)
    commit = policy.due(7, [1], 0)
    assert commit.version == 9
    assert [(each.value, each.timestamp) for each in updates_of(commit)] == [(["x"], 8), (["y"], 9)]
    assert policy.due(9, [], 0) is None


def test_a_whole_step_waits_for_its_last_task():
    """Under bsp the updates of a step are committed when no task of it is open and no live worker is behind."""
    policy = WholeStep()
    policy.judge(one(b"b", task=2, step=1), 0)
    policy.judge(one(b"a", task=1, step=1), 0)
    assert policy.due(0, [1], 1) is None  # a task is open
    assert policy.due(0, [], 0) is None  # a worker has not begun
    policy.judge(one(b"c", task=3, step=2), 0)
    commit = policy.due(0, [2], 1)
    assert [each.task for each in commit.contributions] == [1, 2]
    assert [each.task for each in policy._held] == [3]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"barrier": "psp"}, "no barrier 'psp'"),
        ({"staleness": -1}, "staleness"),
        ({"min_workers": 0}, "min_workers"),
        ({"barrier": "asp", "version_tolerance": 1}, "needs grads_to_wait"),
        ({"barrier": "bsp", "grads_to_wait": 2}, "asp"),
    ],
)
def test_impossible_options_are_refused(options, said):
    """The error names the option and why."""
    with pytest.raises(ValueError, match=said):
        ServerOptions(**options)
