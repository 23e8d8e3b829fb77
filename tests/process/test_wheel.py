"""The wheel: what is in it, and that it runs alone in an environment of its own, outside of the checkout."""

from __future__ import annotations

import json
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
#: Folders of this repository, which a user's project has as well.
NAMES = ("training", "overlay", "tests", "benchmarks", "tools")
SCRIPT = """
from pathlib import Path
import torch
import p2pnode
import training, overlay, tests, benchmarks, tools
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
swarm = p2pnode.attach(model, optimizer)
while not swarm.done:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    swarm.step()
mine = all(one.MINE for one in (training, overlay, tests, benchmarks, tools))
Path("finds").write_text(f"step {swarm.step_number}, {mine}")
"""


def tracked(*places: str) -> list[str]:
    """The files that git keeps, below the root; a wheel of the working folder may have more."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    done = subprocess.run(["git", "ls-files", "-z", *places], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]


def installed() -> list[str]:
    """The files of the packages, as the wheel has them: below the one package that links to the others."""
    links = [f"p2pnode/{package}" for package in PACKAGES if package != "p2pnode"]
    names = [name for name in tracked(*PACKAGES) if name not in links]
    return [name if name.startswith("p2pnode/") else f"p2pnode/{name}" for name in names]


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
    others = [name for name in installed() if not name.endswith(".py") and name not in sources]

    assert others
    assert [name for name in others if not any(PurePosixPath(name).match(pattern) for pattern in patterns)] == []


def train_beside_packages(tmp_path: Path, python: object) -> None:
    """Train in a folder whose packages have the names of ours, with the p2pnode of this Python."""
    folder = tmp_path / "users"
    for name in NAMES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("MINE = True\n")
    (folder / "train.py").write_text(SCRIPT)
    settings = ["--state-dir", "state", "--port", "0", "--status-port", "0", "--set", "training.max_steps=3"]
    run(python, "-m", "p2pnode", "run", *settings, "--", python, "train.py", cwd=folder)
    assert (folder / "finds").read_text() == "step 3, True"


@pytest.mark.long
def test_a_users_packages_and_those_of_a_checkout_hide_none_of_each_other(tmp_path: Path) -> None:
    """`training/` and others beside the script are the user's, with p2pnode installed as a link to its checkout."""
    train_beside_packages(tmp_path, sys.executable)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_wheel_runs_the_demo_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """`pip wheel .` has all files of the packages and the compiled kernels, and nothing else of the repository; from it
    alone, with no checkout in reach, `p2pnode demo` reaches its
    goal: four daemons together know all ten classes, and each part alone, with as many steps, stays near 0.7."""
    source = tmp_path / "source"
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    dist = tmp_path / "dist"
    run(sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "-q", "-w", dist, cwd=source)
    shutil.rmtree(source)
    [wheel] = dist.glob("p2pnode-*.whl")

    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    compiled = {name for name in names if name.startswith("p2pnode/training/kernels/_compiled")}
    assert {name for name in names - compiled if not name.endswith(".c")} == {
        name for name in installed() if not name.endswith(".c")
    }
    assert bool(compiled) == (shutil.which("cc") is not None)

    run(sys.executable, "-m", "venv", "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", wheel, cwd=tmp_path)
    # The dependencies, PyTorch among them, are those of this environment. Its own p2pnode is a link that only a folder
    # of site-packages follows, which this one is not for the new environment.
    [place] = (tmp_path / "env").glob("lib/python*/site-packages")
    (place / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    shown = run(
        python,
        "-c",
        "import p2pnode; from p2pnode import training; print(p2pnode.__file__, training.__file__)",
        cwd=tmp_path,
    )
    assert all(Path(one).is_relative_to(place) for one in shown.split())
    figures = json.loads(run(tmp_path / "env" / "bin" / "p2pnode", "demo", "--json", cwd=tmp_path).splitlines()[-1])
    assert figures["success"]
    assert figures["accuracy"] >= 0.95
    assert 0.6 < figures["alone"] < 0.8
    assert figures["population_estimate"] == 4
    assert figures["bytes_sent_per_node_and_step"] > 0
    train_beside_packages(tmp_path, python)
