"""data_coverage: 2,000 random histories of nodes that share a data set; samples trained twice, and samples skipped.

The histories are those of the tests (`tests/harness/histories/data_histories.py`), longer and with more data. A history
that is not as promised is printed with its seed, and counted.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor

from benchmarks.record import Outcome, Series
from tests.harness.histories.data_histories import Tally, play

HISTORIES = 2000
#: Simulated seconds in which nodes come and go.
SECONDS = 40.0
PROCESSES = 4
FIRST_SEED = 10_000


def one_history(seed: int) -> Tally:
    return play(seed, seconds=SECONDS)


def measure(arguments: argparse.Namespace) -> Outcome:
    count = arguments.repetitions or HISTORIES
    tallies: list[Tally] = []
    with ProcessPoolExecutor(PROCESSES) as pool:
        for tally in pool.map(one_history, range(FIRST_SEED, FIRST_SEED + count), chunksize=10):
            tallies.append(tally)
            if tally.twice or tally.skipped:
                print(tally, file=sys.stderr, flush=True)

    def total(name: str) -> int:
        return sum(getattr(tally, name) for tally in tallies)

    trained = total("trained")
    details = {name: total(name) for name in ("joins", "leaves", "deaths", "epochs", "trained")}
    conditions = (
        f"{count} histories of {SECONDS:g} simulated seconds and more: up to 8 nodes, the fastest a hundred times as "
        f"fast as the slowest; {details['joins']} joins, {details['leaves']} leaves, {details['deaths']} deaths; "
        "data sets of 40 to 300 partitions and streams of as many blocks; delays up to 0.4 s, up to a fifth of all "
        "messages lost, deaths detected after 2 to 6 s"
    )
    return Outcome(
        "data_coverage",
        conditions,
        [
            Series(
                "shared data: samples of complete epochs that no node trained", "", [total("skipped")], "≤ 0", details
            ),
            Series("shared data: samples trained twice in an epoch by living nodes", "", [total("twice")], "≤ 0"),
            Series(
                "shared data: trained twice because the first node died",
                "%",
                [100 * total("twice_after_death") / trained],
            ),
            Series(
                "shared data: trained only after an epoch later than the next had begun",
                "%",
                [100 * total("late") / trained],
                "≤ 0",
            ),
            Series("shared data: samples trained", "", [trained]),
        ],
    )
