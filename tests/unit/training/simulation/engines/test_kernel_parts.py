"""The barrier arithmetic of the kernels, against the daemon's predicates."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pnode.training.barriers.predicates import make_barrier
from p2pnode.training.settings import BarrierSettings

pytest.importorskip("numba", reason="the compiled engine is an extra: pip install p2pnode[simulate]")


@given(
    mine=st.integers(0, 12),
    others=st.lists(st.integers(0, 12), max_size=7),
    staleness=st.integers(0, 6),
    quantile=st.sampled_from([0.1, 0.25, 0.28, 0.5, 0.75, 0.9, 1.0]),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_compiled_predicate_is_the_shared_one(
    mine: int, others: list[int], staleness: int, quantile: float
) -> None:
    """Any steps, staleness and quantile: the compiled verdict equals that of `training.barriers.predicates`."""
    from p2pnode.training.simulation.engines import kernel_parts

    shared = make_barrier(BarrierSettings(method="pssp", sample=1, staleness=staleness, quantile=quantile))

    assert kernel_parts.passes(mine, np.array(others, np.int64), staleness, quantile) == shared.passes(mine, others)


def test_the_compiled_predicate_is_the_shared_one_on_every_small_case() -> None:
    """All steps 0…3 of up to three others, every staleness 0…2 and four quantiles."""
    from p2pnode.training.simulation.engines import kernel_parts

    for staleness, quantile in itertools.product((0, 1, 2), (0.3, 0.5, 0.67, 1.0)):
        shared = make_barrier(BarrierSettings(method="pssp", sample=1, staleness=staleness, quantile=quantile))
        for count in range(4):
            for others in itertools.product(range(4), repeat=count):
                for mine in range(4):
                    steps = np.array(others, np.int64)
                    assert kernel_parts.passes(mine, steps, staleness, quantile) == shared.passes(mine, others)
