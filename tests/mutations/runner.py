"""Applies one fault of the table after the other to a copy of the tree, and runs the test that must fail under it.

A fault is *killed* when its test fails, *survives* when it passes, and is *stale* when its text is not in the source
exactly once. A test that fails without any fault proves nothing, so each is run once on the unchanged copy first.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.mutations.table import Change, Mutation

ROOT = Path(__file__).resolve().parents[2]
#: What the tests of the table need.
FOLDERS = ("overlay", "training", "p2pnode", "tests")
FILES = ("pyproject.toml",)
TIMEOUT_S = 900.0


class Verdict(NamedTuple):
    """`outcome`: killed, survived, stale, or broken: the test does not run, or fails without the fault as well."""

    mutation: Mutation
    outcome: str
    seconds: float
    detail: str = ""


def stale(root: Path, change: Change) -> str:
    """Why a change cannot be applied; empty if it can."""
    file = root / change.file
    if not file.is_file():
        return f"{change.file} does not exist"
    found = file.read_text(encoding="utf-8").count(change.old)
    return "" if found == 1 else f"{change.file} has the text {found} times: {change.old.strip()[:60]}"


def copy_tree(to: Path) -> None:
    """The packages and their tests, without what was generated."""
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "browser", "process")
        shutil.copytree(ROOT / folder, to / folder, ignore=ignored)
    for file in FILES:
        shutil.copy(ROOT / file, to / file)


def run(to: Path, mutations: Iterable[Mutation]) -> Iterable[Verdict]:
    """Try each fault in the copy of the tree at `to`; the copy is unchanged afterwards."""
    sound: dict[str, bool] = {}
    for mutation in mutations:
        began = time.perf_counter()
        if reasons := [reason for change in mutation.changes if (reason := stale(to, change))]:
            yield Verdict(mutation, "stale", 0.0, "; ".join(reasons))
            continue
        if mutation.test not in sound:
            sound[mutation.test] = _test(to, mutation.test)[0] == 0
        if not sound[mutation.test]:
            yield Verdict(mutation, "broken", time.perf_counter() - began, "its test fails without it")
            continue
        began = time.perf_counter()
        former = {change.file: (to / change.file).read_text(encoding="utf-8") for change in mutation.changes}
        try:
            for change in mutation.changes:
                text = (to / change.file).read_text(encoding="utf-8")
                (to / change.file).write_text(text.replace(change.old, change.new), encoding="utf-8")
            code, why = _test(to, mutation.test)
        finally:
            for file, text in former.items():
                (to / file).write_text(text, encoding="utf-8")
        # 1: tests failed. Everything else is an error of the fault itself, such as a module that cannot be imported.
        outcome = {0: "survived", 1: "killed"}.get(code, "broken")
        yield Verdict(mutation, outcome, time.perf_counter() - began, why)


def _test(root: Path, test: str) -> tuple[int, str]:
    """The exit code of pytest, and the line that names the error."""
    # No limit of pytest's own: on a loaded machine it would look like a failure of the test.
    options = ("-q", "-x", "-p", "no:cacheprovider", "-p", "pytest_timeout", "--timeout", "0")
    command = [sys.executable, "-B", "-m", "pytest", *options, test]
    # Plugins that no test of the table needs take longer to load than most of its tests to run.
    own = {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = {**os.environ, **own}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, f"not finished within {TIMEOUT_S:.0f} s"
    lines = [line[2:].strip() for line in done.stdout.splitlines() if line.startswith("E  ")]
    return done.returncode, lines[0] if lines else done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
