"""`p2pnode simulate advise` on daemons that run: a swarm of three, one that waits, one alone, and none."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

from benchmarks.daemons import Daemon, Daemons, daemons, status
from p2pnode.errors import ExitCode
from p2pnode.training.settings import BarrierSettings, ExchangeSettings, TrainingSettings
from tests.harness.project.repository import ROOT
from tests.process.harness.forked_python import run_p2pnode, with_daemon

#: A loaded machine starts daemons slowly; a quiet one within two seconds.
DEADLINE_S = 180.0
SEED = 6
STEP_S = 0.05


def start(group: Daemons, number: int, bootstrap: str = "", *, min_nodes: int = 1, mean_s: float = STEP_S) -> Daemon:
    """A daemon whose trainer sleeps for exponential times."""
    training = TrainingSettings(
        task="tests.process.harness.sleeping_daemon:SleepingTrainer",
        min_nodes=min_nodes,
        eval_steps=0,
        checkpoint_s=0.0,
        options={"number": number, "seed": SEED, "mean_s": mean_s},
    )
    return group.start(
        training,
        bootstrap=bootstrap,
        command=(
            "tests.process.harness.forked_command",
            with_daemon().path,
            "-m",
            "tests.process.harness.sleeping_daemon",
        ),
        barrier=BarrierSettings(method="bsp"),
        exchange=ExchangeSettings(shards=1),
    )


def until(node: Daemon, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
    """The node's status when it first meets the condition."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        answer = status(node)
        if answer is not None and condition(answer):
            return answer
        time.sleep(0.05)
    raise AssertionError(f"not within {DEADLINE_S} s: {what}; its last lines:\n{node.last_lines()}")


def advise(address: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The command as a process."""
    arguments = ["simulate", "advise", "--from", f"http://{address}", *options]
    return run_p2pnode(arguments, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=DEADLINE_S * 3)


def api_of(node: Daemon) -> str:
    assert node.client is not None
    return node.client.address


def test_a_running_swarm_is_advised() -> None:
    """Three daemons under bsp, whose steps are exponential: the recommended barrier is faster, and a sentence names
    it."""
    print(f"seed {SEED}")
    with daemons() as group:
        first = start(group, 0, min_nodes=3)
        found = until(first, lambda answer: True, "the first node answers")
        others = [start(group, number, str(found["node"]["address"]), min_nodes=3) for number in (1, 2)]
        for node in (first, *others):
            until(node, lambda answer: int(answer["step"]) >= 40, "forty steps")

        plain = advise(api_of(first))
        machine = advise(api_of(others[0]), "--json")

    assert plain.returncode == 0, plain.stderr
    assert "3 nodes" in plain.stdout
    assert "recommended: " in plain.stdout
    assert "At present (bsp)" in plain.stdout
    assert "% faster" in plain.stdout
    assert "[barrier]" in plain.stdout
    answer = json.loads(machine.stdout)
    assert answer["nodes"] == 3
    assert answer["present"]["barrier"]["method"] == "bsp"
    assert answer["recommended"]["steps_per_second"] > answer["present"]["steps_per_second"]


def test_what_cannot_be_advised_is_said() -> None:
    """A node that waits for others, one that trains alone, an address without a node: one sentence and a hint."""
    with daemons() as group:
        waiting, alone = start(group, 0, min_nodes=2), start(group, 1)
        until(waiting, lambda answer: answer["state"] == "waiting_for_nodes", "the first node waits")
        until(alone, lambda answer: int(answer["step"]) >= 2, "two steps of the node alone")
        gone = api_of(alone)

        early, lonely = advise(api_of(waiting)), advise(gone)
        group.end()
        nobody = advise(gone)

    assert early.returncode == ExitCode.USAGE
    assert "has made no step yet: it is waiting for nodes" in early.stderr
    assert lonely.returncode == ExitCode.USAGE
    assert "trains alone" in lonely.stderr
    assert nobody.returncode == ExitCode.NOT_REACHABLE
    for answer in (early, lonely, nobody):
        assert answer.stderr.startswith("error: ")
        assert "hint: " in answer.stderr
