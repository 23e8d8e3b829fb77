"""Every file of `examples/` in a swarm of two real nodes, by the command in its docstring, at a small size."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from p2pnode.client import NodeClient, find
from p2pnode.errors import UserError
from tests.harness.project.repository import ROOT
from tests.process.harness.forked_python import start_p2pnode

EXAMPLES = ROOT / "examples"

#: A loaded machine imports torch slowly.
START_S = 120.0

#: Instead of what the commands say: a few steps, and two nodes that begin together.
SMALL = {
    "training.max_steps": "6",
    "training.local_steps": "2",
    "training.min_nodes": "2",
    "training.linger_s": "20",
    "training.threads": "1",
    "barrier.method": "bsp",
}
SMALL_ARGUMENTS = {"--width": "32", "--layers": "1", "--steps": "12"}

PROGRAMS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}


def commands(path: Path) -> list[str]:
    """The indented commands in the docstring of an example, the one that starts it first."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return [line.strip() for line in text.splitlines() if re.match(r"    (cd examples && )?(p2pnode|python) ", line)]


def prepared(command: str, flags: list[str]) -> list[str]:
    """The words of a command, with the programs of this environment, `flags` and small sizes."""
    words = shlex.split(command)
    for position, word in enumerate(words[:-1]):
        if word in SMALL_ARGUMENTS:
            words[position + 1] = SMALL_ARGUMENTS[word]
        key = words[position + 1].partition("=")[0]
        if word == "--set" and key in SMALL:
            words[position + 1] = f"{key}={SMALL[key]}"
    at = words.index("--") if "--" in words else len(words)
    words[at:at] = flags
    return [part for word in words for part in PROGRAMS.get(word, [word])]


class Node:
    """One node of an example, in a folder of its own beside a link to `examples/`."""

    def __init__(self, folder: Path, command: str, bootstrap: str = "") -> None:
        folder.mkdir()
        (folder / "examples").symlink_to(EXAMPLES)
        self.folder, self.state_dir = folder, folder / "state"
        flags = ["--port", "0", "--status-port", "0", "--state-dir", str(self.state_dir)]
        flags += ["--bootstrap", bootstrap] if bootstrap else []
        said = command.replace("cd examples && ", "")
        for key, value in SMALL.items():
            flags += [] if f"{key}=" in command else ["--set", f"{key}={value}"]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("P2PNODE_")}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._output = folder / "output"
        with self._output.open("wb") as output:
            program, *arguments = prepared(said, flags)
            assert program == "p2pnode"
            self.process = start_p2pnode(
                arguments,
                cwd=folder / "examples" if said != command else folder,
                env=environment,
                stdout=output,
                stderr=output,
            )

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def address(self) -> str:
        """As soon as the node tells it."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and self.process.poll() is None:
            found = find(self.state_dir)
            with contextlib.suppress(UserError):
                if found and found.pid == self.process.pid and (status := NodeClient(found.address).status()):
                    return str(status["node"]["address"])
            time.sleep(0.05)
        raise AssertionError(f"it has no address: {self.output}")

    def wait(self) -> int:
        try:
            return self.process.wait(START_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end: {self.output}") from None

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[Callable[[str], list[Node]]]:
    """Runs a command in two nodes, to their end."""
    started: list[Node] = []

    def run(command: str) -> list[Node]:
        started.append(Node(tmp_path / "0", command))
        started.append(Node(tmp_path / "1", command, started[0].address()))
        for node in started:
            assert node.wait() == 0, node.output
            assert "Traceback" not in node.output
        return started

    yield run
    for node in started:
        node.end()


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


@pytest.mark.timeout(240)
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
    assert all(f"the shared model: accuracy {accuracy[1]} after step 6" in node.output for node in nodes)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "says", "needs"),
    [
        ("character_transformer", "", ()),
        ("records", "this node trained", ()),
        ("kmeans", "with 6 centres", ()),
        ("ddp", "the shared model: accuracy", ()),
        ("task_class", "", ()),
        ("huggingface_lora", "the adapters are in adapters; loss", ("transformers", "accelerate", "peft")),
        ("lightning_module", "the shared model: accuracy", ("lightning",)),
    ],
)
def test_an_example_trains_one_model_in_two_nodes(
    name: str, says: str, needs: tuple[str, ...], two_nodes: Callable[[str], list[Node]]
) -> None:
    """It ends with code 0 on both nodes, prints its last line there, and both export the same file."""
    missing = [package for package in needs if find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: make test-frameworks installs it")

    nodes = two_nodes(commands(EXAMPLES / f"{name}.py")[0])

    assert exported(nodes[0]) == exported(nodes[1])
    assert all(says in node.output for node in nodes)
