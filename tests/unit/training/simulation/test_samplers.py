"""Samplers: biased draws, and pools that are renewed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from p2pnode.training.simulation.reference import ReferenceEngine
from p2pnode.training.simulation.run import simulate
from tests.harness.builders.small_plans import small_plan

pytest.importorskip("numba", reason="the compiled engine is an extra: pip install p2pnode[simulate]")


def test_a_biased_sampler_draws_the_wide_more_often() -> None:
    """The owner of a random id: of 200 nodes the most drawn is drawn at least three times as often as the mean."""
    engine = ReferenceEngine(small_plan("pssp", 200, 5, sampler="biased"))
    counts = np.zeros(200)
    for _ in range(4000):
        for peer in engine._sampler.draw(0, 5, 0.0, lambda _peer: False):
            counts[peer] += 1

    assert counts.max() > 3 * counts.mean()
    assert counts[0] == 0


def test_a_pool_that_is_renewed_slowly_holds_its_nodes_back() -> None:
    """A small, stale pool is a held sample: fewer steps than from a pool that is renewed at once."""
    base = small_plan("pbsp", 300, 5, discipline="pool", pool_size=10, duration_s=60.0)

    stale = simulate(replace(base, pool_renewal_s=1e6))
    fresh = simulate(replace(base, pool_renewal_s=0.05))

    assert stale.steps.mean() < 0.95 * fresh.steps.mean()
