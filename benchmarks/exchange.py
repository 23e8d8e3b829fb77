"""exchange: one full step of exchange among real daemons on the loopback, without training.

Push all shards, pull all shards: MB of float32 parameters per second and peer, processor time per peer and step, and
memory beside the vector. Each way to exchange takes turns with the plain float32 one, whose daemons stay; ratios are of
neighbouring turns. `--peers`, `--parameters` (millions), `--ways` and `--repetitions` choose a part.
"""

from __future__ import annotations

import argparse

from benchmarks import contestants as of
from benchmarks.contestants import Ours, Way
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
#: Sealed streams beside plain ones, as issue and DESIGN have it.
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
            with of.ours(way, peers, parameters) as other:
                other.reset_peaks()
                turns, base_turns = of.alternate([other, base], repetitions)
                series += _figures(other, turns)
                plain = of.speed_mb_s(base_turns, parameters)
                ratio = of.ratios(of.speed_mb_s(turns, parameters), plain)
                aim = SEALED_AIM if way.sealed and way.codec == "float32" else ""
                series.append(Series(f"{_label(other)}: speed beside plain float32", "", ratio, aim))
    return series


def _label(group: Ours) -> str:
    return f"{group.way.name}, {group.parameters / 1e6:g} M among {group.peers}"


def _figures(group: Ours, turns: list[of.Turn]) -> list[Series]:
    label = _label(group)
    details = {"shares": group.shares, "seconds": [round(turn.seconds, 4) for turn in turns]}
    beside = group.peak_mb() - 4e-6 * group.parameters
    return [
        Series(f"{label}", "MB/s per peer", of.speed_mb_s(turns, group.parameters), details=details),
        Series(f"{label}: processor time", "s per peer and step", of.cpu_per_peer(turns, group.peers)),
        Series(f"{label}: peak memory over the vector's own size", "MB", [beside]),
    ]
