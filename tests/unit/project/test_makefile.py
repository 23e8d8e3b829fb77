"""The Makefile, CI script and pins: what a fresh machine depends on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import p2pnode
from tests.harness.project.repository import ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found: dict[str, str] = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            found[canonicalize_name(name)] = version
    return found


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    return [
        Requirement(text)
        for text in [
            *project["dependencies"],
            *(one for name in ("torch", "test", "dev", "deploy", "docs", "browser") for one in extras[name]),
        ]
    ]


def make(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    # Without the outer make's flags: these tests run under `make test` themselves.
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
    return subprocess.run(
        ["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@needs_make
def test_make_accepts_the_targets() -> None:
    """Make can plan every target without running it."""
    result = make("--dry-run", "demo", "test", "check", "format", "generated", "bench", "docs", "clean", "pins", "help")

    assert (result.returncode, result.stderr) == (0, "")


@needs_make
def test_missing_python_is_said_in_a_sentence(tmp_path: Path) -> None:
    """Without a fitting Python, make fails before it changes anything, and names what to install."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)

    result = make("test", "PYTHON=no-such-python", folder=tmp_path)

    assert result.returncode != 0
    assert "p2pnode needs Python 3.11 or newer" in result.stderr
    assert "make PYTHON=" in result.stderr
    assert not (tmp_path / ".venv").exists()


@needs_make
def test_clean_keeps_what_people_made(tmp_path: Path) -> None:
    """`make clean` removes caches and the environment, and leaves state folders, results and sources alone."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    kept = [tmp_path / "state" / "identity.key", tmp_path / "benchmarks" / "results" / "a.json", tmp_path / "a.py"]
    removed = [
        tmp_path / ".venv" / "x",
        tmp_path / "build" / "x",
        tmp_path / "__pycache__" / "x",
        tmp_path / "p.egg-info" / "x",
    ]
    for path in [*kept, *removed]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    result = make("clean", folder=tmp_path)

    assert result.returncode == 0, result.stderr
    assert [path.exists() for path in kept] == [True] * len(kept)
    assert [path.parent.exists() for path in removed] == [path.parent == tmp_path for path in removed]


def test_every_dependency_is_pinned() -> None:
    """Each requirement of pyproject.toml, extras included, has a pin that satisfies it."""
    pinned = pins()
    unmet = [
        str(requirement)
        for requirement in requirements()
        if not requirement.specifier.contains(pinned.get(canonicalize_name(requirement.name), "0"))
    ]

    assert unmet == []


def test_pins_are_exact() -> None:
    """Every line of constraints.txt names one version; none has a local label, which only one machine would have."""
    loose = {name: version for name, version in pins().items() if not re.fullmatch(r"[0-9][0-9a-z.]*", version)}

    assert loose == {}


def test_pins_name_no_cuda_packages() -> None:
    """The pins were resolved without CUDA, so that they install on machines without a GPU. What reads the driver is one
    file of Python."""
    cuda = [name for name in pins() if name.startswith(("nvidia-", "cuda-", "triton"))]
    assert cuda == ["nvidia-ml-py"]


@pytest.fixture
def ci_with_stub_make(tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs a copy of .ci/run where every installed program is found and `make` fails at one target alone."""
    checkout = tmp_path / "checkout"
    (checkout / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", checkout / ".ci" / "run")
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("nft", "promtool", "etcd", "chromium", "apt-get"):
        (programs / name).write_text("#!/bin/sh\nexit 0\n", encoding="utf-8")
    (programs / "make").write_text(
        '#!/bin/sh\necho "ran: $*"\nif [ "$*" = "$FAILING" ]; then exit 7; fi\n', encoding="utf-8"
    )
    for program in programs.iterdir():
        program.chmod(0o755)

    def run(failing: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "FAILING": failing}
        return subprocess.run(
            [checkout / ".ci" / "run"], env=environment, text=True, capture_output=True, timeout=60, check=False
        )

    return run


@pytest.mark.parametrize(
    ("failing", "status"),
    [("", 0), ("test", 7), ("test ARGS=-m long", 7), ("test-browser", 7), ("check", 7)],
)
def test_ci_succeeds_only_where_every_target_does(
    ci_with_stub_make: Callable[[str], subprocess.CompletedProcess[str]], failing: str, status: int
) -> None:
    """.ci/run has status 0 where every target of make has, and else that of the one that fails."""
    done = ci_with_stub_make(failing)

    assert done.returncode == status, done.stdout + done.stderr
    # Each once, and what tests need before the tests.
    expected = [
        ".venv/.all",
        "test",
        "test ARGS=-m long",
        "docs",
        "check",
    ]
    ran = [line.removeprefix("ran: ") for line in done.stdout.splitlines() if line.startswith("ran: ")]
    ran = [line for line in ran if line != "test-browser"]
    assert ran == expected[: expected.index(failing) + 1 if failing in expected else None]
    # What runs beside the others is told of as well, unless something before it has failed.
    assert ("ran: test-browser" in done.stdout) == (failing not in ("test", "test ARGS=-m long", "check"))


def test_version_stands_in_one_form() -> None:
    """The package has the version that pyproject.toml gives."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert p2pnode.__version__ == project["version"]
