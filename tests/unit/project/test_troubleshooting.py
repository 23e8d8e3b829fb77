"""docs/troubleshooting.md has every finding of `/status`, exit code and alert, and every reason why a join fails."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
import yaml  # type: ignore[import-untyped]

from overlay.bootstrap import advice
from p2pnode.commands.forget import WRITTEN
from p2pnode.errors import LASTING, ExitCode
from tests.harness.project.repository import ROOT, syntax_nodes

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
#: Where findings are made, and the functions and arguments that make them; None: every function of the module.
SOURCES: dict[str, str | None] = {
    "p2pnode/status/health.py": None,
    "p2pnode/status/line.py": "line_findings",
    "p2pnode/status/versions.py": "version_findings",
    "p2pnode/status/dispatch.py": "dispatch_findings",
    "p2pnode/status/devices.py": "device_findings",
    "p2pnode/config/rules.py": "warnings_for",
    "training/sharing/service.py": "_unusual",
    "training/evaluations.py": "missing",
}
MAKERS = {"Finding", "_warning", "ConfigProblem"}
#: Texts that are made elsewhere, in a function listed above, or by the master of records.
PASSED_ON = {"advice.what", "missing", "what"}


def template(node: ast.expr, known: dict[str, ast.expr]) -> str:
    """The text of an expression, with an ellipsis for each value that is known only when it runs."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(template(value, known) for value in values)
        case ast.FormattedValue(value=ast.Name(id=name)) if isinstance(known.get(name), ast.JoinedStr):
            return template(known[name], known)
        case ast.BinOp(left=left, right=right):
            return template(left, known) + template(right, known)
        case ast.Name(id=name) if name in known:
            return template(known[name], known)
    return "…"


def findings(path: str, function: str | None) -> Iterator[str]:
    """What the findings of a module say."""
    for node in syntax_nodes(path):
        if not isinstance(node, ast.FunctionDef) or function not in (None, node.name) or node.name in MAKERS:
            continue
        known = {
            target.id: one.value
            for one in ast.walk(node)
            if isinstance(one, ast.Assign)
            for target in one.targets
            if isinstance(target, ast.Name)
        }
        for one in ast.walk(node):
            if isinstance(one, ast.Call) and ast.unparse(one.func) in MAKERS:
                what = one.args[0] if one.args else next(word.value for word in one.keywords if word.arg == "what")
            elif isinstance(one, ast.Yield) and isinstance(one.value, ast.Tuple):
                what = one.value.elts[2]
            elif isinstance(one, ast.Return) and node.name == "missing" and one.value is not None:
                what = one.value.body if isinstance(one.value, ast.IfExp) else one.value
            else:
                continue
            text = re.sub(r"…([:.]?…)+", "…", template(what, known))
            if text.strip("… "):
                yield text
            elif text:
                assert ast.unparse(what) in PASSED_ON, (
                    f"{path}: a finding whose text cannot be read: {ast.unparse(what)}"
                )


def test_every_finding_is_explained() -> None:
    """What `/status` may show under `health` stands in the table, with an ellipsis for each value."""
    texts = {text for path, function in SOURCES.items() for text in findings(path, function)}
    explained = set(re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE))

    assert len(texts) > 20
    assert sorted(texts - explained) == []


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


def test_every_reason_why_a_node_cannot_join_is_explained() -> None:
    """A row of the table begins with each part of a reason that has advice of its own."""
    shown = set(re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| (`.+?) \| .+ \| .+ \|$", PAGE, re.MULTILINE))))
    parts = {part for part, _ in advice._ADVICE}

    assert sorted(parts - shown) == []


@pytest.mark.parametrize("name", ["identity.key", "incarnation", "genesis", "swarm.key", "status.token", "trainer.log"])
def test_the_files_of_a_state_directory_are_those_that_a_node_writes(name: str) -> None:
    """The table of docs/operations.md names files that `p2pnode forget` knows."""
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")

    assert f"`{name}`" in page
    assert name in WRITTEN
