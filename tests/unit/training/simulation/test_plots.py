"""Plots: the corners of a distribution function, and files that are written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from p2pnode.training.simulation.plots import Line, Panel, distribution, draw


def test_a_distribution_function_is_a_staircase() -> None:
    """From 0 to 1, with a vertical step at each value as high as its share."""
    x, y = distribution(np.array([2, 5, 2, 9]))

    assert x == [2, 2, 5, 5, 9, 9]
    assert y == [0, 0.5, 0.5, 0.75, 0.75, 1.0]


def test_panels_are_drawn_into_one_file(tmp_path: Path) -> None:
    """Lines and marks, linear and logarithmic; a folder that does not exist is an error of the operating system."""
    pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install p2pnode[simulate]")
    line = Line("ours", [1, 10, 100], [1, 2, 3])
    marks = Line("_ours", [1, 10, 100], [1, 2, 2.5], marks=True, color="ours")
    panels = [Panel("one", "x", "y", [line, marks], log_x=True), Panel("two", "x", "y")]

    draw(panels, tmp_path / "out.png", "title")

    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(OSError, match="missing"):
        draw(panels, tmp_path / "missing" / "out.png")
