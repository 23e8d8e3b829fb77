"""What a run's end tells the user. That all nodes write the same bytes is in tests/simulated/test_final_model.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2pnode.lifecycle.run_result import RunResult
from training.goal import Best


@pytest.mark.parametrize(("name", "loader"), [("m.safetensors", "load_file"), ("m.pt", "torch.load")])
def test_the_lines_say_steps_best_metric_file_and_how_to_load_it(name: str, loader: str) -> None:
    """Two lines of Python, which compile, with the path in them."""
    result = RunResult("max_steps", 60, f"/srv/a'b/{name}", "ab12", "", Best("accuracy", 0.97, 50))

    text = "\n".join(result.lines())

    assert "after 60 steps (max_steps)" in text
    assert "best accuracy: 0.97, at step 50" in text
    assert len(result.how_to_load) == 2
    assert loader in text
    compile("\n".join(result.how_to_load), "lines", "exec")
    assert "may differ" not in text


def test_a_model_that_may_differ_or_was_not_written_is_named() -> None:
    """Silence would pass for a promise."""
    result = RunResult("max_seconds", 3, "", "", "2 nodes train on")

    assert result.lines() == [
        "the run has ended after 3 steps (max_seconds)",
        "no file of the model was written",
        "it may differ from the model of other nodes: 2 nodes train on",
    ]


def test_a_start_that_trained_nothing_says_so_and_what_to_do() -> None:
    """The same command once more, of a run that has all its steps; one that trains the rest is not told."""
    whole = RunResult("max_steps", 6, "/srv/m.pt", "ab12", "")

    again = replace(whole, began_at=6).lines()
    print(again)

    assert "trained nothing" in again[1]
    assert all(way in again[1] for way in ("training.max_steps", "--run", "p2pnode forget"))
    for other in (whole, replace(whole, began_at=5), RunResult("until", 6, "", "", "", began_at=6)):
        assert "trained nothing" not in "\n".join(other.lines())
