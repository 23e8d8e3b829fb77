"""The wheel: what is in it, and that it runs alone in an environment of its own, outside of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from tests.harness.project.repository import PACKAGES, ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def tracked(*places: str) -> list[str]:
    """The files that git keeps, below the root; a wheel of the working folder may have more."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    done = subprocess.run(["git", "ls-files", "-z", *places], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]


def run(*command: object, cwd: Path, timeout_s: float = 300) -> str:
    environment = {"PATH": os.environ["PATH"], "HOME": str(cwd), "OMP_NUM_THREADS": "1"}
    # A mirror that pip is told of by the environment.
    environment |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def test_every_file_of_the_packages_is_declared() -> None:
    """What is no Python in the packages is package data or a source of the compiled kernels: a wheel would lack it."""
    patterns = {
        f"{package.replace('.', '/')}/{pattern}"
        for package, listed in PROJECT["tool"]["setuptools"]["package-data"].items()
        for pattern in listed
    }
    sources = {one for module in PROJECT["tool"]["setuptools"]["ext-modules"] for one in module["sources"]}
    others = [name for name in tracked(*PACKAGES) if not name.endswith(".py") and name not in sources]

    assert others
    assert [name for name in others if not any(PurePosixPath(name).match(pattern) for pattern in patterns)] == []


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_wheel_runs_the_demo_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """`pip wheel .` has all files of the packages and the compiled kernels, and nothing else of the repository; from it
    alone, with no checkout in reach, `p2pnode demo` reaches its goal."""
    source = tmp_path / "source"
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    dist = tmp_path / "dist"
    run(sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "-q", "-w", dist, cwd=source)
    shutil.rmtree(source)
    [wheel] = dist.glob("p2pnode-*.whl")

    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    compiled = {name for name in names if name.startswith("training/kernels/_compiled")}
    assert {name for name in names - compiled if not name.endswith(".c")} == {
        name for name in tracked(*PACKAGES) if not name.endswith(".c")
    }
    assert bool(compiled) == (shutil.which("cc") is not None)

    run(sys.executable, "-m", "venv", "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", wheel, cwd=tmp_path)
    # The dependencies, PyTorch among them, are those of this environment. Its own p2pnode is a link that only a folder
    # of site-packages follows, which this one is not for the new environment.
    [place] = (tmp_path / "env").glob("lib/python*/site-packages")
    (place / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    shown = run(python, "-c", "import p2pnode, training; print(p2pnode.__file__, training.__file__)", cwd=tmp_path)
    assert all(Path(one).is_relative_to(place) for one in shown.split())
    assert "the demo reached its goal" in run(tmp_path / "env" / "bin" / "p2pnode", "demo", cwd=tmp_path)
