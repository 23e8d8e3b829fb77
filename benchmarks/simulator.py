"""simulator: the speed of `p2pnode simulate` at a thousand nodes, and against SimPy on the same model.

Every command runs in a process of its own, so that the start of Python and the loading of compiled code count. The
first compilation by numba is done before, and measured separately.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import simpy

from benchmarks.record import NotMeasured, Outcome, Series
from p2pnode.training.barriers.predicates import make_barrier
from p2pnode.training.settings import BarrierSettings
from p2pnode.training.simulation.plan import Plan
from p2pnode.training.simulation.run import simulate
from p2pnode.training.simulation.step_times import StepTimes

REPETITIONS = 5
#: The swarm for SimPy: large enough for its queue to matter, small enough for the run to end.
SIMPY_NODES, SIMPY_DURATION_S, REPOLL_S = 1000, 20.0, 0.1
THOUSAND = ("--nodes", "1000", "--barrier", "pbsp", "--sample", "10", "--duration", "400", "--steps", "exp:1",
            "--discipline", "repoll", "--repoll", "0.1", "--seed", "1", "--json")  # fmt: skip


def measure(arguments: argparse.Namespace) -> Outcome:
    repetitions = arguments.repetitions or REPETITIONS
    with tempfile.TemporaryDirectory(prefix="p2pnode-numba-") as cache:
        cold = _command(THOUSAND, {"NUMBA_CACHE_DIR": cache})
        warm = [_command(THOUSAND, {"NUMBA_CACHE_DIR": cache}) for _ in range(repetitions)]
    ratios, details = _beside_simpy(repetitions)
    series = [
        Series("simulate, 1,000 nodes × 400 s, pbsp β = 10 every 0.1", "s", [one["seconds"] for one in warm], "≤ 2"),
        Series("simulate, 1,000 nodes: processor time", "s", [one["cpu_seconds"] for one in warm]),
        Series("simulate, 1,000 nodes, the first time ever: numba compiles", "s", [cold["seconds"]]),
        Series("simulate: events per second over SimPy's, 1,000 nodes, pssp every 0.1", "", ratios, "≥ 20", details),
    ]  # fmt: skip
    conditions = (
        "commands as whole processes, the compiled code cached; processor time beside wall time, which load "
        "makes longer; an event is a completed step or a test of a barrier; "
        "SimPy: a process per node, random.sample, the same predicate"
    )
    return Outcome("simulator", conditions, series)


def _command(options: Sequence[str], environment: dict[str, str]) -> dict[str, float]:
    """Run `p2pnode simulate`; seconds, and those of processor time."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "p2pnode", "simulate", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | environment)
    _, code, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(code)
    seconds = time.perf_counter() - began
    if process.returncode:
        raise NotMeasured(f"p2pnode simulate ended with exit code {process.returncode}")
    return {"seconds": seconds, "cpu_seconds": usage.ru_utime + usage.ru_stime}


# -- SimPy ------------------------------------------------------------------------------------------------------------


def _beside_simpy(repetitions: int) -> tuple[list[float], dict[str, Any]]:
    """Events per second of processor time, this simulator's over SimPy's, taking turns in this process."""
    ratios, rates, means = [], [], []
    plan = Plan(
        nodes=SIMPY_NODES,
        barrier=BarrierSettings(method="pssp", sample=10, staleness=4),
        duration_s=SIMPY_DURATION_S,
        steps=StepTimes("exp", 1.0),
        discipline="repoll",
        repoll_s=REPOLL_S,
    )
    simulate(plan)
    for seed in range(repetitions):
        began = time.process_time()
        run = simulate(plan)
        ours = run.events / (time.process_time() - began)
        theirs, mean = _simpy(seed)
        ratios.append(ours / theirs)
        rates.append((round(ours), round(theirs)))
        means.append((round(float(run.steps.mean()), 2), round(mean, 2)))
    return ratios, {"events_per_s_ours_and_simpy": rates, "mean_steps_ours_and_simpy": means}


def _simpy(seed: int) -> tuple[float, float]:
    """Events per second and mean steps of the same model as SimPy processes."""
    world = simpy.Environment()
    generator = random.Random(seed)
    barrier = make_barrier(BarrierSettings(method="pssp", sample=10, staleness=4))
    steps = [0] * SIMPY_NODES
    events = 0

    def node(number: int) -> Iterator[Any]:
        nonlocal events
        others = range(SIMPY_NODES)
        while True:
            yield world.timeout(generator.expovariate(1.0))
            steps[number] += 1
            events += 1
            while True:
                events += 1
                sample = [steps[peer] for peer in generator.sample(others, 11) if peer != number][:10]
                if barrier.passes(steps[number], sample):
                    break
                yield world.timeout(REPOLL_S)

    for number in range(SIMPY_NODES):
        world.process(node(number))  # type: ignore[arg-type]
    began = time.process_time()
    world.run(until=SIMPY_DURATION_S)
    return events / (time.process_time() - began), sum(steps) / SIMPY_NODES
