"""peers: the exchange beside hivemind, gloo, blocking sockets and a memory copy, all in one run, taking turns.

The same number of peers on the loopback have the same number of float32 parameters. hivemind needs an environment of
its own, whose Python is named by `--hivemind`; without it the others are measured. Its peers get a network namespace
with nothing but a loopback, which takes root. A turn of p2pnode is one step of exchange (asp: begins together, ends
with the last). Under bsp all end with the same values, as after an all-reduce, so that is measured too.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from benchmarks import contestants as of
from benchmarks.contestants import Contestant, Way
from benchmarks.record import NotMeasured, Outcome, Series

REPETITIONS = 7
PEERS = (4,)
MILLIONS = (25,)

#: A way of p2pnode, hivemind's codec, and the aim for the ratio of their speeds.
PAIRS = (
    (Way("float32"), "none", "≥ 6"),
    (Way("bfloat16"), "float16", "≥ 8"),
    (Way("int8"), "8bit", "≥ 10"),
)
CPU_AIM = "≤ 0.2"
GLOO_AIM = "≥ 0.4"
#: The sizes that the aims are for, beside hivemind and beside gloo. Smaller vectors, other groups: shown without an
#: aim.
JUDGED_PARAMETERS, JUDGED_PEERS, GLOO_PEERS = 25_000_000, (4,), (2, 4, 8)


def measure(arguments: argparse.Namespace) -> Outcome:
    repetitions = arguments.repetitions or REPETITIONS
    series: list[Series] = []
    for millions in arguments.parameters or MILLIONS:
        for peers in arguments.peers or PEERS:
            series += _beside_limits(peers, int(1e6 * millions), repetitions)
            for way, codec, aim in PAIRS if arguments.hivemind is not None else ():
                series += _beside_hivemind(way, codec, aim, peers, int(1e6 * millions), repetitions, arguments.hivemind)
    return Outcome(
        "peers",
        "the same number of peers and parameters on the loopback, taking turns in one run; ours: daemons with a stub "
        "trainer, replicas = 0; hivemind 1.1.12: matchmaking not timed, in a network namespace; gloo: one thread per "
        "process; sockets: a ring all-reduce's bytes without arithmetic; ratios are of neighbouring turns",
        series,
    )


def _beside_limits(peers: int, parameters: int, repetitions: int) -> list[Series]:
    given = ["--parameters", str(parameters)]
    label = f"{parameters / 1e6:g} M among {peers}"
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(of.ours(Way(), peers, parameters))
        together = stack.enter_context(of.ours(Way(barrier="bsp"), peers, parameters))
        gloo = stack.enter_context(of.program("gloo", of.module("benchmarks.limits", "gloo", *given), peers))
        sockets = stack.enter_context(of.program("sockets", of.module("benchmarks.limits", "sockets", *given), peers))
        copy = stack.enter_context(of.program("copy", of.module("benchmarks.limits", "copy", *given), 1))
        group: list[Contestant] = [ours, together, gloo, sockets, copy]
        turns = of.alternate(group, repetitions)
    speeds = [of.speed_mb_s(taken, parameters) for taken in turns]
    series = []
    for contestant, taken, speed in zip(group, turns, speeds, strict=True):
        series.append(Series(f"{contestant.name}, {label}", "MB/s per peer", speed, details=_details(taken)))
        series.append(
            Series(
                f"{contestant.name}, {label}: processor time",
                "s per peer and turn",
                of.cpu_per_peer(taken, contestant.peers),
            )
        )
    gloo_aim = GLOO_AIM if parameters == JUDGED_PARAMETERS and peers in GLOO_PEERS else ""
    series.append(Series(f"{ours.name} beside gloo, {label}", "", of.ratios(speeds[0], speeds[2]), gloo_aim))
    series.append(Series(f"{together.name} beside gloo, {label}", "", of.ratios(speeds[1], speeds[2])))
    series.append(Series(f"{ours.name} beside blocking sockets, {label}", "", of.ratios(speeds[0], speeds[3])))
    return series


def _beside_hivemind(
    way: Way, codec: str, aim: str, peers: int, parameters: int, repetitions: int, python: Path
) -> list[Series]:
    script = Path(__file__).with_name("hivemind_peers.py")
    inner = 'ip link set lo up && exec "$@"'
    command = ["unshare", "--net", "sh", "-c", inner, "sh", str(python), str(script)]
    command += ["--parameters", str(parameters), "--codec", codec]
    label = f"{parameters / 1e6:g} M among {peers}"
    # Its log of every round would be measured too.
    quiet = {"HIVEMIND_LOGLEVEL": "CRITICAL"}
    with of.ours(way, peers, parameters) as ours, of.program(f"hivemind {codec}", command, peers, quiet) as theirs:
        turns = of.alternate([ours, theirs], repetitions)
        if "values changed: False" in theirs.said():
            raise NotMeasured(f"hivemind's {codec} reported success and averaged nothing: is its numpy older than 2.4?")
    is_judged = parameters == JUDGED_PARAMETERS and peers in JUDGED_PEERS
    our_speed, their_speed = (of.speed_mb_s(taken, parameters) for taken in turns)
    our_cpu, their_cpu = (of.cpu_per_peer(taken, peers) for taken in turns)
    return [
        Series(f"hivemind {codec}, {label}", "MB/s per peer", their_speed, details=_details(turns[1])),
        Series(f"hivemind {codec}, {label}: processor time", "s per peer and turn", their_cpu),
        Series(f"{ours.name} in the same run, {label}", "MB/s per peer", our_speed, details=_details(turns[0])),
        Series(f"{ours.name} in the same run, {label}: processor time", "s per peer and turn", our_cpu),
        Series(
            f"speed of {ours.name} over hivemind {codec}, {label}",
            "",
            of.ratios(our_speed, their_speed),
            aim if is_judged else "",
        ),
        Series(
            f"processor time of {ours.name} over hivemind {codec}, {label}",
            "",
            of.ratios(our_cpu, their_cpu),
            CPU_AIM if is_judged else "",
        ),
    ]


def _details(turns: list[of.Turn]) -> dict[str, list[float]]:
    return {"seconds": [round(turn.seconds, 4) for turn in turns]}
