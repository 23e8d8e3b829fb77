"""Short names of barriers."""

from __future__ import annotations

from p2pnode.training.simulation.model.barrier_names import parse_barrier


def test_pbsp_of_no_sample_is_asp() -> None:
    """With β = 0 the sample is empty, and the shared predicate passes, as asp does."""
    from p2pnode.training.barriers.predicates import make_barrier

    for mine in range(50):
        assert make_barrier(parse_barrier("pbsp(1)")).passes(mine, [])
