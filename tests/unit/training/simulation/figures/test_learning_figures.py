"""Claims about the order of learning runs."""

from __future__ import annotations

from p2pnode.training.simulation.figures.learning_figures import order_verdict


def test_an_order_holds_only_beyond_its_noise() -> None:
    """Above on every seed by one amount it holds; above in the mean of a wide scatter it is not distinguishable."""
    low = [0.5, 0.6, 0.4, 0.55, 0.45]
    assert order_verdict([[value + 0.1 for value in low]], [low]) == "holds"
    assert order_verdict([[0.9, 0.3, 0.8, 0.2, 0.7]], [low]) == "not distinguishable"
    assert order_verdict([[value - 0.1 for value in low]], [low]) == "fails"
    assert order_verdict([[0.9] * 5, [value - 0.1 for value in low]], [low]) == "fails"
