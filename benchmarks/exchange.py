"""exchange: one full step of exchange among real daemons on the loopback, without training.

Push all shards, pull all shards: MB of float32 parameters per second and peer, processor time per peer and step, and
memory beside the vector. Each way to exchange takes turns with the plain float32 one, whose daemons stay, and a sealed
one with the same unsealed; ratios are of neighbouring turns. `--peers`, `--parameters` (millions), `--ways` and
`--repetitions` choose a part.
"""

from __future__ import annotations

import argparse

from benchmarks import contestants as of
from benchmarks.contestants import Ours, Way
from benchmarks.gate import Turn
from benchmarks.record import Outcome, Series

REPETITIONS = 7
PEERS = (2, 4, 8)
MILLIONS = (4, 25)
BASE = Way()
WAYS = (
    Way("bfloat16"),
    Way("int8"),
    Way("float32", replicas=1),
    Way("bfloat16", replicas=1),
    Way("int8", replicas=1),
    Way("float32", sealed=True),
    Way("bfloat16", sealed=True),
    Way("int8", sealed=True),
    Way("bfloat16", sealed=True, replicas=1),
)
#: A sealed exchange beside the same unsealed.
SEALED_AIM = "≥ 0.6"


def measure(arguments: argparse.Namespace) -> Outcome:
    repetitions = arguments.repetitions or REPETITIONS
    series: list[Series] = []
    chosen = [way for way in WAYS if not arguments.ways or way.name in arguments.ways]
    for millions in arguments.parameters or MILLIONS:
        for peers in arguments.peers or PEERS:
            series += _group(peers, int(1e6 * millions), chosen, repetitions)
    return Outcome(
        "exchange",
        "real daemons on the loopback, each with a stub trainer that hands over noise at once; one turn: every daemon "
        f"pushes all {of.SHARDS} shards and pulls all, asp, default outer rule; values are pulled as float32 with "
        "float32 deltas, else as bfloat16; a step begins together and ends with the last; MB are of float32 "
        "parameters; ratios are of neighbouring turns",
        series,
    )


def _group(peers: int, parameters: int, ways: list[Way], repetitions: int) -> list[Series]:
    series = []
    with of.ours(BASE, peers, parameters) as base:
        _, alone = base, of.alternate([base], repetitions)[0]
        series += _figures(base, alone)
        for way in ways:
            if not way.sealed or way._replace(sealed=False) == BASE:
                series += _beside(way, base, repetitions)
        for way in ways:
            if way.sealed and (plain := way._replace(sealed=False)) != BASE:
                with of.ours(plain, peers, parameters) as unsealed:
                    series += _beside(way, unsealed, repetitions)
    return series


def _beside(way: Way, other: Ours, repetitions: int) -> list[Series]:
    """The figures of one way, and its speed beside a group that is there, by turns."""
    with of.ours(way, other.peers, other.parameters) as group:
        group.reset_peaks()
        turns, other_turns = of.alternate([group, other], repetitions)
        ratios = of.ratios(*(of.speed_mb_s(taken, other.parameters) for taken in (turns, other_turns)))
        name = f"{_label(group)}: speed beside {other.way.name}"
        return [*_figures(group, turns), Series(name, "", ratios, SEALED_AIM if way.sealed else "")]


def _label(group: Ours) -> str:
    return f"{group.way.name}, {group.parameters / 1e6:g} M among {group.peers}"


def _figures(group: Ours, turns: list[Turn]) -> list[Series]:
    label = _label(group)
    details = {"shares": group.shares, "seconds": [round(turn.seconds, 4) for turn in turns]}
    beside = group.peak_mb() - 4e-6 * group.parameters
    return [
        Series(f"{label}", "MB/s per peer", of.speed_mb_s(turns, group.parameters), details=details),
        Series(f"{label}: processor time", "s per peer and step", of.cpu_per_peer(turns, group.peers)),
        Series(f"{label}: peak memory over the vector's own size", "MB", [beside]),
    ]
