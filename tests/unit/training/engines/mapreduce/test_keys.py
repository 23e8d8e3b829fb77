"""Buckets of keys."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pnode.training.engines.mapreduce.stages import bucket_of
from tests.harness.project.repository import ROOT

KEYS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)


@given(KEYS, KEYS)
def test_equal_keys_have_one_bucket(one: object, other: object) -> None:
    """Keys that a dict takes for one go to one bucket."""
    if one == other:
        assert bucket_of(one, 1 << 30) == bucket_of(other, 1 << 30)


@pytest.mark.parametrize(
    "same", [(1, 1.0, True, np.int64(1)), (0, -0.0, False), (0.5, np.float64(0.5)), (10**20, 1e20)]
)
def test_numbers_that_are_equal_are_one_key(same: tuple[object, ...]) -> None:
    """1, 1.0 and True are one key in Python, so they are here."""
    assert len({bucket_of(key, 1 << 30) for key in same}) == 1


def test_keys_spread_over_all_buckets() -> None:
    """Ten thousand words give no bucket twice its share."""
    counts = [0] * 16
    for number in range(10_000):
        counts[bucket_of(f"word-{number}", 16)] += 1

    assert max(counts) < 2 * 10_000 / 16
    assert min(counts) > 10_000 / 16 / 2


def test_a_bucket_is_the_same_in_every_process() -> None:
    """Python's own hash of a string differs between processes; the bucket does not."""
    code = "from p2pnode.training.engines.mapreduce.stages import bucket_of; print(bucket_of(('a', 1, None), 1 << 30))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }

    assert found == {f"{bucket_of(('a', 1, None), 1 << 30)}\n"}
