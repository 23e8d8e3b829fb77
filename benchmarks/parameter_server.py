"""parameter_server: steps of a second under bsp, pssp and asp, with a worker that is four times as slow as the others.

One server and six workers, each a daemon and a script of its own, on this machine; they sleep for their step. The steps
of all workers within the same time are counted at the server, from the first commit on. The barriers run in turns. With
five of six in the common sample the straggler is in most samples: with fewer pssp is hardly slower than asp.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.record import NotMeasured, Outcome, Series
from p2pnode.client import NodeClient, find

WORKERS = 6
STEP_S = 0.5
SLOWNESS = 4.0
SECONDS = 20.0
TURNS = 3
BARRIERS = ("bsp", "pssp", "asp")
START_S = 60.0

SCRIPT = """
import json, sys, time
import p2pnode

barrier, place, seconds, step_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
engine = p2pnode.engine("server")
began = []

def stop(ctx):
    now = time.monotonic()
    if ctx.version and not began:
        began.extend((now, ctx.version))
    if not began or now - began[0] < seconds:
        return False
    print(json.dumps({"updates": ctx.version - began[1], "seconds": now - began[0]}), flush=True)
    return True

def push(ctx, params):
    time.sleep(step_s)
    return [("total", 1)]

engine.register_schedule(lambda ctx, workers: dict.fromkeys(workers, ["total"]))
engine.register_push(push)
engine.register_pull("add")
engine.register_stop(stop)
engine.start(barrier=barrier, staleness=4, sample=5, min_workers=int(sys.argv[5]))
"""


def steps_per_second(barrier: str) -> float:
    """Updates of a second in one run."""
    with tempfile.TemporaryDirectory(prefix="p2pnode-bench-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        script = home / "steps.py"
        script.write_text(SCRIPT, encoding="utf-8")
        nodes: list[subprocess.Popen[str]] = []
        bootstrap = ""
        try:
            for place in range(WORKERS + 1):
                slow = SLOWNESS if place == WORKERS else 1.0
                given = [barrier, place, SECONDS, STEP_S * slow, WORKERS]
                nodes.append(_start(home / str(place), script, [str(one) for one in given], bootstrap, place == 0))
                bootstrap = bootstrap or _address(home / "0", nodes[0])
            output, _ = nodes[0].communicate(timeout=START_S + 3 * SECONDS)
        finally:
            for node in nodes:
                if node.poll() is None:
                    node.terminate()
            for node in nodes:
                node.wait(START_S)
    found = [line for line in output.splitlines() if line.startswith('{"updates"')]
    if not found:
        raise NotMeasured(f"the server under {barrier} printed no result: {output[-500:]}")
    told = json.loads(found[-1])
    return float(told["updates"]) / float(told["seconds"])


def _start(state: Path, script: Path, given: list[str], bootstrap: str, is_server: bool) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "p2pnode", "run", "--state-dir", str(state), "--port", "0", "--status-port", "0"]
    command += ["--set", "node.role=server"] if is_server else []
    command += ["--bootstrap", bootstrap] if bootstrap else []
    return subprocess.Popen(
        [*command, "--", sys.executable, str(script), *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if is_server else subprocess.DEVNULL,
        text=True,
    )


def _address(state: Path, node: subprocess.Popen[str]) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and node.poll() is None:
        found = find(state)
        if found is not None and found.pid == node.pid:
            return str(NodeClient.of(found).status()["node"]["address"])
        time.sleep(0.05)
    raise NotMeasured("the server has no address")


def measure(arguments: argparse.Namespace) -> Outcome:
    rates: dict[str, list[float]] = {barrier: [] for barrier in BARRIERS}
    for _ in range(arguments.repetitions or TURNS):
        for barrier in BARRIERS:
            rates[barrier].append(steps_per_second(barrier))
    over = [sampled / slow for sampled, slow in zip(rates["pssp"], rates["bsp"], strict=True)]
    under = [sampled / free for sampled, free in zip(rates["pssp"], rates["asp"], strict=True)]
    return Outcome(
        "parameter_server",
        f"one server, {WORKERS} workers with steps of {STEP_S:g} s, one of them {SLOWNESS:g} times as slow; "
        f"{SECONDS:g} s each, in turns",
        [
            *(Series(f"parameter server, straggler: steps/s, {one}", "1/s", found) for one, found in rates.items()),
            Series("parameter server, straggler: pssp(4, 5) over bsp", "x", over, "≥ 1"),
            Series("parameter server, straggler: pssp(4, 5) over asp", "x", under, "≤ 1"),
        ],
    )
