"""The files of the dashboard: whole, small, strict, and in the installed package."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from p2pnode.status.pages import POLICY, STATIC, read_files
from tests.harness.project.repository import ROOT

#: Bytes of a page with everything that it loads, uncompressed.
MOST_BYTES = 160_000


def loaded_by(page: str) -> set[str]:
    """The paths of a page and of all that it loads: links and scripts, and what the scripts import."""
    files = read_files()
    found: set[str] = set()
    wanted = {page}
    while wanted:
        path = wanted.pop()
        found.add(path)
        text = files[path].body.decode()
        if path in ("/", "/swarm"):
            wanted |= set(re.findall(r'(?:href|src)="(/static/[^"]+)"', text)) - found
        elif path.endswith(".js"):
            wanted |= {STATIC + name for name in re.findall(r'from "\./([\w.]+)"', text)} - found
    return found


def test_both_pages_and_all_that_they_load_are_small() -> None:
    """The page and its scripts have less than 160 KB, without compression; nothing is loaded from elsewhere."""
    files = read_files()
    for page in ("/", "/swarm"):
        paths = loaded_by(page)
        assert len(paths) > 10
        assert sum(len(files[path].body) for path in paths) < MOST_BYTES
    for path, file in files.items():
        if "uplot" not in path and path.endswith((".html", ".js", ".css")):
            assert not re.findall(r"https?://(?!www\.w3\.org/)", file.body.decode()), path


def test_no_file_is_left_over() -> None:
    """Every file is loaded by a page, but the licence of uPlot, which is served beside it."""
    assert set(read_files()) - loaded_by("/") - loaded_by("/swarm") == {f"{STATIC}LICENSE-uPlot.txt"}


def test_the_policy_allows_nothing_inline_and_nothing_foreign() -> None:
    """Scripts and styles come from this node alone, and the pages hold none that the policy would stop."""
    assert "unsafe" not in POLICY
    assert POLICY.startswith("default-src 'none'")
    for page in ("/", "/swarm"):
        text = read_files()[page].body.decode()
        assert not re.search(r"\sstyle=|\son\w+=|<style|javascript:", text)
        assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", text))


def test_no_script_makes_markup_of_text() -> None:
    """What a peer sends reaches the page as text: no script of ours writes HTML."""
    for path, file in read_files().items():
        if path.endswith(".js") and "uplot" not in path:
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", file.body.decode())


def test_the_package_contains_them() -> None:
    """The wheel takes the folder along, and names the licence of what is not ours."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folder = ROOT / "p2pnode" / "status" / "static"
    taken = {
        path.name
        for pattern in project["tool"]["setuptools"]["package-data"]["p2pnode"]
        for path in (ROOT / "p2pnode").glob(pattern)
    }

    assert {path.name for path in folder.iterdir() if path.name != "package.json"} <= taken
    assert "p2pnode/status/static/LICENSE-uPlot.txt" in project["project"]["license-files"]
    assert "MIT" in (folder / "LICENSE-uPlot.txt").read_text()


FOLDER = Path(__file__).parent / "dashboard"


def test_the_scripts_of_the_dashboard_do_what_their_tests_say() -> None:
    """Formats, the parser of the stream, the series, the steps and the sentences."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    files = sorted(str(path) for path in FOLDER.glob("*.test.mjs"))
    assert len(files) >= 6

    done = subprocess.run([node, "--test", *files], capture_output=True, text=True, timeout=60, check=False)

    print(done.stdout)
    assert done.returncode == 0, done.stderr
