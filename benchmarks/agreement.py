"""agreement: 32 real daemons with sleeping trainers on the loopback, against the simulator, barrier by barrier.

Both draw the same step times, node by node (`benchmarks.stub_daemon`), so that they differ by what the simulator leaves
out alone: processes, sockets, pushes and pulls. Progress is the mean of completed steps after `DURATION_S`; the spread
is the standard deviation over the nodes, averaged over looks at the second half.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass

from benchmarks.daemons import DEADLINE_S, Daemon, daemons, status
from benchmarks.record import NotMeasured, Outcome, Series
from p2pnode.training.settings import BarrierMethod, BarrierSettings, ExchangeSettings, TrainingSettings
from p2pnode.training.simulation.model.plan import Plan
from p2pnode.training.simulation.model.step_times import StepTimes
from p2pnode.training.simulation.run import simulate

NODES = 32
#: No step lasts the ten seconds after which a daemon no longer waits for a peer (e⁻¹⁰): the simulator has no such rule.
STEP_S = 1.0
DURATION_S = 90.0
REPOLL_S = 0.1
LOOKS = 12
SEED = 1


@dataclass(frozen=True, slots=True)
class Run:
    """What both sides are given. `looks` at the second half: at one moment the spread is a whole number or two."""

    nodes: int
    duration_s: float
    step_s: float
    repoll_s: float
    seed: int
    looks: int

    @property
    def looks_s(self) -> list[float]:
        """Seconds after the beginning."""
        return [self.duration_s * (0.5 + 0.5 * look / self.looks) for look in range(1, self.looks + 1)]


RUN = Run(NODES, DURATION_S, STEP_S, REPOLL_S, SEED, LOOKS)
BARRIERS: tuple[tuple[BarrierMethod, int, int], ...] = (("asp", 0, 0), ("bsp", 0, 0), ("pbsp", 5, 0), ("pssp", 5, 2))


def measure(arguments: argparse.Namespace) -> Outcome:  # noqa: ARG001
    series = []
    for method, sample, staleness in BARRIERS:
        barrier = BarrierSettings(method=method, sample=sample, staleness=staleness, resample_s=REPOLL_S)
        mean, spread, waited_s = _real(barrier)
        expected_mean, expected_spread = simulated(barrier, RUN)
        details = {"real": [mean, spread], "simulated": [expected_mean, expected_spread], "start_s": waited_s}
        print(f"  {method}: {details}", file=sys.stderr, flush=True)
        off_mean = 100 * abs(mean / expected_mean - 1)
        off_spread = 100 * abs(spread / expected_spread - 1)
        series.append(
            Series(f"{method}: mean steps of 32 daemons off the simulator's", "%", [off_mean], "≤ 5", details)
        )
        series.append(Series(f"{method}: their spread off the simulator's", "%", [off_spread], "≤ 20"))
    conditions = (
        f"32 daemons with sleeping trainers on the loopback of one machine, exponential steps of {STEP_S:g} s, the "
        f"same in the simulator, {DURATION_S:g} s, re-poll every {REPOLL_S:g} s, pbsp β = 5, pssp β = 5 and s = 2; "
        f"spread: mean of {LOOKS} looks at the second half"
    )
    return Outcome("agreement", conditions, series)


def _real(barrier: BarrierSettings) -> tuple[float, float, float]:
    with daemons() as group:
        nodes: list[Daemon] = []
        for number in range(NODES):
            training = TrainingSettings(
                task="benchmarks.stub_daemon:SleepingTrainer",
                min_nodes=NODES,
                eval_steps=0,
                checkpoint_s=0.0,
                options={"number": number, "seed": SEED, "mean_s": STEP_S},
            )
            bootstrap = _address(nodes[0]) if nodes else ""
            node = group.start(
                training,
                bootstrap=bootstrap,
                command=("benchmarks.stub_daemon",),
                barrier=barrier,
                exchange=ExchangeSettings(shards=4),
            )
            nodes.append(node)
        began = time.monotonic()
        _until_all(nodes)
        # Training begins within a second for all; what a node had done before the first look is its head start.
        started = time.monotonic()
        ahead = statistics.fmean(_steps(nodes))
        spreads = []
        steps: list[int] = []
        for look_s in RUN.looks_s:
            time.sleep(max(0.0, started + look_s - time.monotonic()))
            steps = _steps(nodes)
            spreads.append(statistics.pstdev(steps))
        took_s = time.monotonic() - started
        # The last looks take a moment themselves: progress is scaled to the time planned.
        mean = (statistics.fmean(steps) - ahead) * DURATION_S / took_s
        return mean, statistics.fmean(spreads), started - began


def _address(node: Daemon) -> str:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        found = status(node)
        if found is not None:
            return str(found["node"]["address"])
        time.sleep(0.05)
    raise NotMeasured(f"{node.name} does not answer; its last lines:\n{node.last_lines()}")


def _until_all(nodes: list[Daemon]) -> None:
    deadline = time.monotonic() + 3 * DEADLINE_S
    while time.monotonic() < deadline:
        answers = [status(node) for node in nodes]
        if all(answer is not None and answer["state"] in ("training", "waiting") for answer in answers):
            return
        time.sleep(0.2)
    raise NotMeasured(f"not all of {NODES} daemons train: {[answer and answer['summary'] for answer in answers]}")


def _steps(nodes: list[Daemon]) -> list[int]:
    answers = [status(node) for node in nodes]
    if not all(answers):
        raise NotMeasured("a daemon does not answer")
    return [int(answer["step"]) for answer in answers if answer is not None]


def simulated(barrier: BarrierSettings, run: Run) -> tuple[float, float]:
    """Mean completed steps at the end, and mean spread over the looks, of the simulator."""
    plan = Plan(
        nodes=run.nodes,
        barrier=barrier,
        duration_s=run.duration_s + 1e-6,
        steps=StepTimes("exp", run.step_s),
        discipline="pool",
        repoll_s=run.repoll_s,
        seed=run.seed,
    )
    moments = simulate(plan, moments_s=run.looks_s).moments
    return moments[-1].mean, statistics.fmean(moment.sd for moment in moments)
