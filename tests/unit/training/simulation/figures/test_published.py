"""The published values as data: ranges are ordered, and tables that share a run agree."""

from __future__ import annotations

from p2pnode.training.simulation.figures import published


def test_ranges_are_ordered_and_series_have_a_value_per_x() -> None:
    """A range is (lowest, highest); a sweep has as many values as its axis."""
    ranges = [value for _, value in published.STEPS.values()] + [value for _, value in published.SAMPLE_SIZE.values()]
    ranges += [value for row in published.DISCIPLINE.values() for value, _ in row.values()]
    assert all(low <= high for low, high in ranges)
    for table, axis in (
        (published.STRAGGLER_SHARE, published.SHARES),
        (published.STRAGGLER_FACTOR, published.FACTORS),
        (published.LARGE_STRAGGLER_SHARE, published.LARGE_SHARES),
        (published.SCALE, published.SIZES),
        (published.STORED_ACCURACY, published.SHARES),
    ):
        assert all(len(values) == len(axis) for values in table.values())


def test_tables_of_one_run_agree() -> None:
    """pBSP(10) at P = 1,000, event-driven, is in four tables; asp is pBSP with β = 0."""
    expected = published.STEPS["pbsp(10)"][1][0]

    assert published.DISCIPLINE[10]["event"][0][0] == expected
    assert published.LARGE_STRAGGLER_SHARE["pbsp(10)"][0] == expected
    assert published.SCALE["pbsp(10)"][-1] == expected
    assert published.SAMPLE_SIZE[0][1] == published.STEPS["asp"][1]
