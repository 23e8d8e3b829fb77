"""The alert rules and the dashboard, compared with the metrics that the daemon has; and the rules for a page itself."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.project.exposition import complaints, known_families
from tests.harness.project.repository import ROOT

PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = PROMETHEUS / "p2pnode.rules.yml"
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana" / "p2pnode.json").read_text(encoding="utf-8"))
#: Written by Prometheus itself.
ITS_OWN = {"up", "ALERTS"}


def promtool(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    return subprocess.run([found, *arguments], input=text, capture_output=True, text=True, timeout=60, check=False)


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return list(group["rules"])


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> dict[str, str]:
    """Every expression of the rules and of the dashboard, by the place where it stands."""
    found = {f"alert {rule['alert']}": rule["expr"] for rule in rules()}
    for panel in panels():
        for target in panel["targets"]:
            found[f"panel {panel['id']} {panel['title']} {target['refId']}"] = target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            query = variable["query"]["query"]
            found[f"variable {variable['name']}"] = query.removeprefix("label_values(").rpartition(",")[0]
    for annotation in DASHBOARD["annotations"]["list"]:
        found[f"annotation {annotation['name']}"] = annotation["expr"]
    return found


def metrics_in(expression: str) -> set[str]:
    """The metrics that an expression names, without the names in braces, brackets and groupings."""
    bare = re.sub(r"\{[^}]*\}", "{}", re.sub(r"\b(?:by|without|on|ignoring)\s*\([^)]*\)", "", expression))
    return {name for name in re.findall(r"\b([a-zA-Z_]\w*)\b(?!\s*\()", bare) if "_" in name or name in ITS_OWN} - {
        "group_left"
    }


def test_every_metric_that_is_asked_for_exists() -> None:
    """Rules, panels, variables and annotations ask for metrics that the daemon writes, or Prometheus itself."""
    for place, expression in expressions().items():
        named = metrics_in(expression)

        assert named, place
        assert named <= set(known_families()) | ITS_OWN, place


@pytest.mark.parametrize("prefix", ["device", "dispatch", "exchange", "line", "server", "values"])
def test_each_part_of_a_node_has_a_panel(prefix: str) -> None:
    """The dashboard shows metrics of devices, records, exchange, line, servers and named values."""
    shown = {name for place, text in expressions().items() if place.startswith("panel") for name in metrics_in(text)}

    assert any(name.startswith(f"p2pnode_{prefix}_") for name in known_families())
    assert any(name.startswith(f"p2pnode_{prefix}_") for name in shown)


def test_names_of_metrics_are_found_in_expressions() -> None:
    """The check itself is not vacuous: functions, labels and groupings are no metrics, everything else is."""
    assert metrics_in('sum by (a_b) (rate(c_d_total{e_f="g_h"}[5m])) / on (i_j) up offset 5m') == {"c_d_total", "up"}
    assert len(known_families()) > 50


def test_each_alert_says_what_is_wrong_and_what_to_do() -> None:
    """Names are unique; a severity, a summary with the node, and a next step."""
    names = [rule["alert"] for rule in rules()]

    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert len(rule["annotations"]["summary"]) > 10
        assert len(rule["annotations"]["description"]) > 30


def test_panels_have_places_of_their_own() -> None:
    """Identifiers are unique, no panel is outside the grid, and no two share a place."""
    identifiers = [panel["id"] for panel in DASHBOARD["panels"]]
    places = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & places, panel["title"]
        places |= cells

    assert len(set(identifiers)) == len(identifiers)
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels())


def test_promtool_accepts_the_rules() -> None:
    """`promtool check rules` has no complaint, and `promtool test rules` sees each tested alert fire and be silent."""
    for verb, name in (("check", RULES.name), ("test", "p2pnode.rules.test.yml")):
        result = promtool(verb, "rules", str(PROMETHEUS / name))
        assert result.returncode == 0, result.stdout + result.stderr


def test_promtool_accepts_the_configuration(tmp_path: Path) -> None:
    """`promtool check config` reads the file with its rules; the token's file is where compose.yaml mounts it."""
    text = (PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8")
    (tmp_path / "status.token").write_text("token-of-a-test\n")
    (tmp_path / "prometheus.yml").write_text(text.replace("/etc/p2pnode/", f"{tmp_path}/"))
    shutil.copy(RULES, tmp_path)

    result = promtool("check", "config", str(tmp_path / "prometheus.yml"))

    assert result.returncode == 0, result.stdout + result.stderr


def test_promtool_reads_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    """Each one, with the dashboard's variables filled in, is an expression of Prometheus' language."""
    filled = {
        place: re.sub(r"\$\w+", "x", expression)
        for place, expression in expressions().items()
        if place.startswith(("panel", "annotation"))
    }
    recording = [{"record": f"test:{number}", "expr": text} for number, text in enumerate(filled.values())]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recording}]}))

    result = promtool("check", "rules", str(path))

    assert result.returncode == 0, result.stdout + result.stderr


GOOD = '# HELP p2pnode_a_total What it counts.\n# TYPE p2pnode_a_total counter\np2pnode_a_total{reason="late"} 1\n'


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("", "", ""),
        ("p2pnode_a_total What it counts.", "p2pnode_a_total what", "no sentence"),
        ("# HELP p2pnode_a_total What it counts.\n", "", "has no help"),
        ("counter", "gauge", "end in _total"),
        ("counter", "summary", "of type summary"),
        ("_a_total", "_a_ms_total", "no base unit"),
        ("_a_total", "_a_bits_total", "no base unit"),
        ('reason="late"', 'peer="x"', "series per peer"),
        ('reason="late"', 'reason="dc658722"', "series per peer"),
        ('reason="late"', 'reason="10.0.0.1:8468"', "series per peer"),
        ('reason="late"', 'quantile="0.5"', "reserved"),
        (" 1\n", ' 1\np2pnode_a_total{reason="late"} 2\n', "comes twice"),
        (" 1\n", ' 1\np2pnode_a_total{other="x"} 2\n', "different labels"),
        (" 1\n", " 1", "no end"),
        (" 1\n", " one\n", "not a line"),
        ('a_total{reason="late"} 1', "b_total 1", "stands below"),
        ("p2pnode_a", "a", "no prefix"),
    ],
)
def test_the_rules_for_a_page_find_what_they_are_for(old: str, new: str, complaint: str) -> None:
    """A good page has no complaint; each single fault has its own."""
    found = complaints(GOOD.replace(old, new) if old else GOOD)

    assert bool(found) == bool(complaint)
    assert complaint in "; ".join(found)
