"""docs/troubleshooting.md has every exit code and every alert."""

from __future__ import annotations

import re

import yaml

from p2pnode.errors import LASTING, ExitCode
from tests.harness.project.repository import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


def test_every_exit_code_is_explained() -> None:
    """Each code has a row with what happened and what to do, and those that last are not called curable."""
    rows = dict(re.findall(r"^\| (\d+) \| (.+) \|$", PAGE, re.MULTILINE))

    assert {int(code) for code in rows} == {int(code) for code in ExitCode}
    assert all(len(row.split(" | ")) == 2 for row in rows.values())
    assert ExitCode.IDENTITY_IN_USE in LASTING


def test_every_alert_is_explained() -> None:
    """Each alert rule has a row; no row names an alert that does not exist."""
    rules = yaml.safe_load((ROOT / "deploy/prometheus/p2pnode.rules.yml").read_text(encoding="utf-8"))
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}

    named = {name for row in re.findall(r"^\| (P2PNode.*?) \|", PAGE, re.MULTILINE) for name in row.split(", ")}

    assert named == alerts
