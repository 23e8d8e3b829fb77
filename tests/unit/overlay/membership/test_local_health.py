"""Lifeguard's local health score."""

from __future__ import annotations

from p2pnode.overlay.membership.local_health import LAG_S, MAX_SCORE, LocalHealth


def test_late_ticks_stretch_time_outs_and_punctual_ones_shrink_them() -> None:
    """The score rises and falls by one, and never below zero."""
    health = LocalHealth()
    lagged = [health.on_tick(lag_s) for lag_s in (0.0, 2 * LAG_S, 2 * LAG_S, LAG_S)]

    assert lagged == [False, True, True, False]
    assert (health.score, health.stretch) == (1, 2.0)
    health.on_tick(0.0)
    health.on_tick(0.0)
    assert (health.score, health.stretch) == (0, 1.0)


def test_the_score_is_bounded() -> None:
    """However often the node is suspected, its time-outs are at most eight times as long."""
    health = LocalHealth()
    for _ in range(20):
        health.worsen()

    assert health.score == MAX_SCORE
