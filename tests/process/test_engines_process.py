"""Scripts with an engine under `p2pnode run`: real daemons, sockets and processes, to the end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pnode.errors import ExitCode
from tests.harness.project.repository import ROOT
from tests.process.harness.forked_python import run_p2pnode
from tests.process.harness.swarm_world import START_S, ProcessNode, kill_all, until

Start = Callable[..., ProcessNode]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `p2pnode run` of a Python script; the nodes are ended with the test."""
    nodes: list[ProcessNode] = []

    def run(*script: str, settings: dict[str, Any] | None = None) -> ProcessNode:
        bootstrap = ""
        if nodes:
            until(lambda: bool(nodes[0].address), START_S, "the first node has an address", nodes)
            bootstrap = nodes[0].address
        chosen = {"exchange.shards": 8, "training.linger_s": 20.0, **(settings or {})}
        command = [sys.executable, *script]
        name = f"n{len(nodes)}"
        nodes.append(ProcessNode(tmp_path, name, chosen, bootstrap=bootstrap, script=command, forks=True))
        return nodes[-1]

    yield run
    kill_all(nodes)


def ended(node: ProcessNode) -> str:
    """What a node wrote, once it has ended by itself with code 0."""
    assert node.process.wait(START_S) == 0, node.output()
    return node.output()


def test_word_count_under_a_node_ends_with_code_0(start: Start, tmp_path: Path) -> None:
    """A map-reduce script needs no model of its node: it prints its counts, without stop words, and the node leaves."""
    (tmp_path / "words.txt").write_text("the cat and the dog\nThe cat is in the house\n")

    node = start(str(ROOT / "examples/word_count.py"), str(tmp_path / "words.txt"))

    lines = [line.split() for line in ended(node).splitlines() if re.match(r" +\d", line)]
    assert lines == [["2", "cat"], ["1", "dog"], ["1", "house"]]


def test_a_script_of_no_engine_and_no_model_is_an_error_still(start: Start) -> None:
    """A training script that forgets to attach ends with exit code 8, and the hint names both ways."""
    node = start("-c", "print('nothing')")

    assert node.process.wait(START_S) == ExitCode.TRAINER
    assert "p2pnode.attach(model, optimizer)" in node.output()
    assert "p2pnode.engine" in node.output()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_linear_regression_in_daemons_survives_a_kill_and_a_join(start: Start) -> None:
    """The weights are within 1e-2 at every node that is left, after one was killed with its script and one joined."""
    example = str(ROOT / "examples/linear_regression.py")
    settings = {"training.min_nodes": 3, "barrier.method": "pssp"}
    nodes = [start(example, "--pause", "0.02", "--steps", "150", settings=settings) for _ in range(3)]
    until(lambda: nodes[0].step >= 15, START_S, "15 steps", nodes)
    nodes[1].kill()
    joiner = start(example, "--pause", "0.02", "--steps", "150", settings=settings)
    everybody = [nodes[0], nodes[2], joiner]
    until(lambda: joiner.step >= 1 or joiner.ended, START_S, "the joiner takes part", everybody)

    for node in everybody:
        error = re.search(r"largest error (\S+)", ended(node))
        assert error is not None
        assert float(error[1]) < 1e-2


@pytest.mark.timeout(600)
def test_word_count_names_a_worker_that_was_killed(tmp_path: Path) -> None:
    """A process of the engine is killed while it counts: the script ends with `WorkersLost`, and prints no counts."""
    text = tmp_path / "words.txt"
    # Several seconds of counting: a late look finds it in the middle still.
    text.write_text("the quick brown fox jumps over a lazy dog\n" * 600_000)
    script = subprocess.Popen(
        [sys.executable, str(ROOT / "examples/word_count.py"), "--processes", "2", str(text)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60.0
        while not (busy := [pid for pid in children(script.pid) if processor_s(pid) > 1.0]):
            assert script.poll() is None, "it ended before a worker was killed"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(busy[0], signal.SIGKILL)
        printed, said = script.communicate(timeout=60.0)
    finally:
        script.kill()
        script.wait()

    assert script.returncode == 1
    assert "WorkersLost" in said
    assert printed == ""


def children(pid: int) -> list[int]:
    """Processes that this one has started, and theirs; none if it has ended."""
    try:
        found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return found + [deeper for child in found for deeper in children(child)]


def processor_s(pid: int) -> float:
    """Processor time of a process; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.timeout(600)
def test_a_script_that_fails_names_verb_and_step_and_its_node_ends_with_code_8(start: Start, tmp_path: Path) -> None:
    """The traceback has the `VerbFailed`; the other node goes on to its end."""
    script = tmp_path / "counting.py"
    script.write_text(
        "import sys, time, p2pnode\n"
        "engine = p2pnode.engine('p2p', barrier='asp')\n"
        "def push(ctx, params):\n"
        "    time.sleep(0.02)\n"
        "    if 'fail' in sys.argv and ctx.step == 3: raise RuntimeError('no disk')\n"
        "    return [('n', 1)]\n"
        "engine.register_push(push)\n"
        "engine.register_pull('add')\n"
        "engine.register_stop(lambda ctx: ctx.step >= 20)\n"
        "engine.start()\n"
        "print('total', engine.get('n').value)\n"
    )
    settings = {"training.min_nodes": 2}
    good, bad = start(str(script), settings=settings), start(str(script), "fail", settings=settings)

    assert bad.process.wait(START_S) == ExitCode.TRAINER
    assert re.search(r"VerbFailed: push failed at node \w{8} in step 3: RuntimeError: no disk", bad.output())
    assert "total 23" in ended(good)
    assert [entry["reason"] for entry in good.events("trainer_left")] == ["the script has ended"]


@pytest.mark.timeout(600)
def test_random_tasks_survive_a_killed_worker_and_a_killed_server(start: Start) -> None:
    """Five nodes begin together, two of them servers. One takes over from the other, which is killed; so is a worker,
    whose task is given again. Every update that counts is in the values exactly once; or one died with its worker and
    its server at the same moment, and then every node ends with the error that counts it."""
    settings = {"training.min_nodes": 5}
    example = [
        str(ROOT / "examples/parameter_server_tasks.py"),
        "--barrier",
        "asp",
        "--updates",
        "150",
        "--work",
        "0.05",
    ]
    servers = [start(*example, settings={"node.role": "server", **settings}) for _ in range(2)]
    workers = [start(*example, settings=settings) for _ in range(3)]
    until(lambda: all(node.step >= 3 for node in workers), START_S, "three steps", [*servers, *workers])
    serving = min(servers, key=lambda node: node.status()["node"]["id"])
    until(lambda: serving.status()["server"]["done"] >= 9, 90, "the status counts the tasks", servers)
    assert serving.status()["server"]["workers"] == 3
    assert [node.status()["server"] for node in (*servers, *workers) if node is not serving] == [None] * 4
    workers[0].kill()
    serving.kill()

    standing_by = next(node for node in servers if node is not serving)
    if standing_by.process.wait(START_S) == ExitCode.TRAINER:
        for node in (standing_by, *workers[1:]):
            node.process.wait(START_S)
            assert re.search(r"UpdatesLost: .* \d+ updates? may be missing", node.output())
        return
    counted = re.search(r"(\d+) updates; (\d+) tasks in 10 bins", ended(standing_by))
    assert counted is not None
    assert int(counted[1]) == int(counted[2]) >= 150
    for node in workers[1:]:
        assert re.search(r"this worker completed \d+ tasks", ended(node))


@pytest.mark.timeout(600)
def test_one_script_counts_the_same_with_all_three_engines(tmp_path: Path) -> None:
    """Peer to peer, with a server and two workers, and by map-reduce: the commands of the example differ in the name of
    the engine and in the nodes, and print what `collections.Counter` counts."""
    text = "the quick brown fox jumps over the lazy dog\n" * 50
    (tmp_path / "text").write_text(text)
    counted = sorted(Counter(letter for letter in text if letter.isalpha()).items())
    expected = " ".join(f"{letter}{count}" for letter, count in counted)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("P2PNODE_")}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ways = {
        "p2p": (["--run", "peers", "--local", "3"], ["[1]", "[2]", "[3]"]),
        "server": (["--run", "served", "--local", "3", "--servers", "1"], ["[1]"]),
        "mapreduce": ([], [""]),
    }

    def ran(engine: str, nodes: list[str]) -> subprocess.CompletedProcess[str]:
        script = [sys.executable, str(ROOT / "examples/three_engines.py"), engine, "text"]
        if not nodes:
            return subprocess.run(
                script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=START_S, check=False
            )
        command = ["run", "--set", "exchange.shards=8", "--set", "training.linger_s=20", *nodes, "--", *script]
        return run_p2pnode(command, cwd=tmp_path, env=environment, timeout=START_S, have_torch=False)

    for engine, (nodes, printing) in ways.items():
        done = ran(engine, nodes)
        assert done.returncode == 0, (engine, done.stderr[-3000:])
        assert sorted(done.stdout.splitlines()) == [f"{one} {expected}".strip() for one in printing], engine


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["p2p", "server"])
def test_the_letters_are_right_when_a_node_is_killed_in_the_middle(start: Start, tmp_path: Path, engine: str) -> None:
    """A peer, or a worker, dies while it counts a part: another one counts that part, and the sum is the same."""
    text = "the quick brown fox jumps over the lazy dog\n" * 50
    (tmp_path / "text").write_text(text)
    counted = sorted(Counter(letter for letter in text if letter.isalpha()).items())
    expected = " ".join(f"{letter}{count}" for letter, count in counted)
    example = [str(ROOT / "examples/three_engines.py"), engine, str(tmp_path / "text"), "--pause", "1.0"]
    settings = {"training.min_nodes": 3}
    first = {"node.role": "server"} if engine == "server" else {}
    nodes = [start(*example, settings=settings | (first if number == 0 else {})) for number in range(3)]
    until(lambda: nodes[2].step >= 1, START_S, "a step", nodes)
    nodes[2].kill()

    printed = [expected in ended(node) for node in nodes[:2]]
    assert printed == [True, engine == "p2p"]


def test_a_worker_founds_no_swarm(start: Start, tmp_path: Path) -> None:
    """Without a server the values would be nowhere: the node says what to do, and ends."""
    node = start(str(ROOT / "examples/parameter_server_tasks.py"))

    assert node.process.wait(START_S) == ExitCode.CONFIGURATION
    assert "--set node.role=server" in node.output()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_mnist_network_learns_on_a_parameter_server(start: Start) -> None:
    """A small one learns most of the digits as synchronous SGD, with delays before each push, although a worker is
    killed in the middle."""
    example = [str(ROOT / "examples/parameter_server_mnist.py"), "--updates", "160", "--delay", "0.02"]
    example += ["--maps", "8", "--hidden", "32", "--quota", "2"]
    server, workers = start(*example, settings={"node.role": "server"}), [start(*example) for _ in range(3)]
    until(lambda: all(node.step >= 3 for node in workers), 100.0, "three steps", [server, *workers])
    workers[0].kill()

    accuracy = re.search(r"accuracy (\S+) after 1[6-9]\d updates", ended(server))
    assert accuracy is not None
    assert float(accuracy[1]) > 0.5
