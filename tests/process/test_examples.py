"""Every file of `examples/` in a swarm of two real nodes, by the command in its docstring, at a small size."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.harness.project.repository import ROOT
from tests.process.harness.forked_python import start_p2pnode
from tests.process.harness.swarm_world import START_S, StartedNode, kill_all, until

EXAMPLES = ROOT / "examples"

#: Instead of what the commands say: a few steps, and two nodes that begin together.
SMALL = {
    "training.max_steps": "6",
    "training.local_steps": "2",
    "training.min_nodes": "2",
    "training.linger_s": "20",
    "training.threads": "1",
    "barrier.method": "bsp",
}
SMALL_ARGUMENTS = {"--width": "32", "--layers": "1"}

PROGRAMS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}


def commands(path: Path) -> list[str]:
    """The indented commands in the docstring of an example, the one that starts it first."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return [line.strip() for line in text.splitlines() if re.match(r"    (cd examples && )?(p2pnode|python) ", line)]


def prepared(command: str, flags: list[str], small: Mapping[str, str] = SMALL) -> list[str]:
    """The words of a command, with the programs of this environment, `flags` and small sizes."""
    words = shlex.split(command)
    # The schedule of the learning rate, in optimiser steps, has to be as long as the run (docs/frameworks.md).
    arguments = SMALL_ARGUMENTS | {
        "--steps": str(int(small.get("training.max_steps", "0")) * int(small["training.local_steps"]))
    }
    for position, word in enumerate(words[:-1]):
        if word in arguments:
            words[position + 1] = arguments[word]
        key = words[position + 1].partition("=")[0]
        if word == "--set" and key in small:
            words[position + 1] = f"{key}={small[key]}"
    at = words.index("--") if "--" in words else len(words)
    words[at:at] = flags
    return [part for word in words for part in PROGRAMS.get(word, [word])]


class Node(StartedNode):
    """One node of an example, in a folder of its own beside a link to `examples/`."""

    def __init__(self, folder: Path, command: str, bootstrap: str = "", small: Mapping[str, str] = SMALL) -> None:
        folder.mkdir()
        (folder / "examples").symlink_to(EXAMPLES)
        self.folder = folder
        flags = ["--port", "0", "--status-port", "0", "--state-dir", str(folder / "state")]
        flags += ["--bootstrap", bootstrap] if bootstrap else []
        said = command.replace("cd examples && ", "")
        for key, value in small.items():
            flags += [] if f"{key}=" in command else ["--set", f"{key}={value}"]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("P2PNODE_")}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with (folder / "output").open("wb") as output:
            program, *arguments = prepared(said, flags, small)
            assert program == "p2pnode"
            process = start_p2pnode(
                arguments,
                cwd=folder / "examples" if said != command else folder,
                env=environment,
                stdout=output,
                stderr=output,
            )

        super().__init__(process, folder / "state", folder / "output")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Starts a command in one node more."""
    started: list[Node] = []

    def run(command: str, small: Mapping[str, str] = SMALL) -> Node:
        bootstrap = ""
        if started:
            until(lambda: started[0].address != "", START_S, "the first node has an address", started)
            bootstrap = started[0].address
        started.append(Node(tmp_path / str(len(started)), command, bootstrap, small))
        return started[-1]

    yield run
    kill_all(started)


@pytest.fixture
def two_nodes(start: Callable[..., Node]) -> Callable[[str], list[Node]]:
    """Runs a command in two nodes, to their end."""

    def run(command: str) -> list[Node]:
        # The second node has one rank where the first has two: a rank imports PyTorch for some seconds.
        nodes = [start(command), start(command.replace("--nproc-per-node 2", "--nproc-per-node 1"))]
        for node in nodes:
            assert node.wait() == 0, node.output()
            assert "Traceback" not in node.output()
        return nodes

    return run


def skip_without(packages: tuple[str, ...]) -> None:
    """Skip the test where one of these packages is not installed."""
    if missing := [package for package in packages if find_spec(package) is None]:
        pytest.skip(f"{', '.join(missing)} not installed: make test-frameworks installs it")


def exported(node: Node) -> bytes:
    return (node.state_dir / "model.safetensors").read_bytes()


def test_every_example_has_a_command_and_less_than_80_lines() -> None:
    """The command starts that very file, and README or docs link to each."""
    linked = "".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")])
    files = sorted(EXAMPLES.glob("*.py"))

    assert len(files) >= 6
    for path in files:
        assert len(path.read_text(encoding="utf-8").splitlines()) < 80, path
        assert path.stem in commands(path)[0], path
        assert f"examples/{path.name}" in linked, path


@pytest.mark.long
@pytest.mark.timeout(600)
def test_own_loop_ends_with_one_model_that_can_be_loaded(two_nodes: Callable[[str], list[Node]]) -> None:
    """Both nodes export the same file, and the second command of the example loads it: the accuracy is the trained
    model's."""
    start, load = commands(EXAMPLES / "own_loop.py")

    nodes = two_nodes(start)

    assert exported(nodes[0]) == exported(nodes[1])
    done = subprocess.run(
        prepared(load.replace("model.safetensors", str(nodes[0].state_dir / "model.safetensors")), []),
        cwd=nodes[0].folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    accuracy = re.search(r"the loaded model: accuracy (\S+)", done.stdout)
    assert accuracy is not None
    assert all(f"the shared model: accuracy {accuracy[1]} after step 6" in node.output() for node in nodes)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "says", "needs"),
    [
        ("character_transformer", "", ()),
        ("records", "this node trained", ()),
        ("kmeans", "with 6 centres", ()),
        ("ddp", "the shared model: accuracy", ()),
        ("fsdp", "the shared model: accuracy", ()),
        ("muon", "done at step", ()),
        ("task_class", "", ()),
        ("huggingface_lora", "the adapters are in adapters; loss", ("transformers", "accelerate", "peft")),
        ("lightning_module", "the shared model: accuracy", ("lightning",)),
        ("accelerate_fsdp", "the shared model: accuracy", ("accelerate",)),
        ("lightning_fsdp", "the shared model: accuracy", ("lightning",)),
    ],
)
def test_an_example_trains_one_model_in_two_nodes(
    name: str, says: str, needs: tuple[str, ...], two_nodes: Callable[[str], list[Node]]
) -> None:
    """It ends with code 0 on both nodes, prints its last line there, and both export the same file."""
    skip_without(needs)

    nodes = two_nodes(commands(EXAMPLES / f"{name}.py")[0])

    assert exported(nodes[0]) == exported(nodes[1])
    assert all(says in node.output() for node in nodes)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_trainer_of_torchtitan_trains_one_model_in_two_nodes(two_nodes: Callable[[str], list[Node]]) -> None:
    """Its own loop, on processors. The model's files differ in what its state_dict makes of fused parameters, of which
    a node's description has the bytes only if they are few."""
    skip_without(("torchtitan", "triton"))
    command = commands(EXAMPLES / "torchtitan_llama.py")[0]

    nodes = two_nodes(command.replace("examples/", "-m tests.process.harness.torchtitan_on_cpu examples/"))

    described = [json.loads((node.state_dir / "model" / "description.json").read_text()) for node in nodes]
    assert described[0]["layout_digest"] == described[1]["layout_digest"]
    assert all("the run has ended after 6 steps" in node.output() for node in nodes)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_own_loop_goes_on_when_a_node_is_killed_in_the_middle(start: Callable[..., Node]) -> None:
    """Of three nodes one is killed with its script. The two others train to the end and export the same file."""
    # So many that it is in the middle still where a look at it comes late.
    small = SMALL | {"training.max_steps": "40", "training.min_nodes": "3"}
    nodes = [start(commands(EXAMPLES / "own_loop.py")[0], small) for _ in range(3)]
    until(lambda: nodes[2].step >= 3, START_S, "it trains", nodes)
    nodes[2].kill()
    assert max(node.step for node in nodes[:2]) < 40

    assert [node.wait() for node in nodes[:2]] == [0, 0], nodes[0].output() + nodes[1].output()
    assert exported(nodes[0]) == exported(nodes[1])
    said = [re.search(r"the shared model: accuracy \S+ after step (\d+)", node.output()) for node in nodes[:2]]
    assert said[0] is not None
    assert said[1] is not None
    assert said[0][0] == said[1][0]
    assert int(said[0][1]) > 3
