"""The small language of `training.tracker`."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pnode.config.rules import check
from p2pnode.config.settings import Config
from p2pnode.config.tracker import PACKAGES, Tracker, parse_tracker
from p2pnode.training.settings import TrainingSettings
from tests.harness.project.repository import ROOT


@pytest.mark.parametrize(
    ("text", "tracker"),
    [
        ("", None),
        ("csv:steps.csv", Tracker("csv", "steps.csv")),
        ("tensorboard:/runs/a:b", Tracker("tensorboard", "/runs/a:b")),
        ("trackio", Tracker("trackio", "")),
    ],
)
def test_trackers_are_named_with_their_place(text: str, tracker: Tracker | None) -> None:
    """A kind, and what follows the first colon."""
    assert parse_tracker(text) == tracker


@pytest.mark.parametrize("text", ["csv", "csv:", "tensorboard:", "wandb", "wandb:x", "trackio:x", "CSV:x", ":x"])
def test_what_is_no_tracker_keeps_the_node_from_starting(text: str) -> None:
    """The problem names the setting and the three forms."""
    [problem] = check(Config(training=TrainingSettings(tracker=text)))

    assert "training.tracker" in problem.what
    assert "csv:FILE" in problem.do


def test_a_relative_place_is_inside_the_state_directory() -> None:
    """An absolute one stays as it is."""
    assert Tracker("csv", "a.csv").path(Path("/state")) == Path("/state/a.csv")
    assert Tracker("csv", "/data/a.csv").path(Path("/state")) == Path("/data/a.csv")


def test_the_extra_of_a_tracker_has_its_package() -> None:
    """The hint for a missing package names the extra as the tracker; that extra installs the package."""
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

    for kind, package in PACKAGES.items():
        assert f'\n{kind} = ["{package}>=' in pyproject
