"""fuzz: minutes of mutated datagrams and request heads into the overlay of a node, one swarm after another.

The fuzzer is the one of the tests (`tests/harness/attacks/fuzz.py`), the swarm is simulated, the overlay's code is the
real one. A failure is printed with its seed and the last bytes, and counted; the next seed follows.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import sys
import time
from collections import Counter

from benchmarks.record import Outcome, Series
from benchmarks.start import resident_bytes
from tests.harness.attacks.fuzz import NODES, ROUND, Fuzz
from tests.harness.environment.virtual_loop import VirtualLoop

MINUTES = 10.0
#: Rounds of one swarm: long enough for what piles up to show, short enough for many seeds.
ROUNDS = 200
FIRST_SEED = 1000


def measure(arguments: argparse.Namespace) -> Outcome:
    minutes = arguments.minutes or MINUTES
    end_s = time.monotonic() + 60 * minutes
    failures: list[str] = []
    total: Counter[str] = Counter()
    datagrams = heads = seeds = 0
    resident: list[tuple[float, int]] = []
    began_s = time.monotonic()
    while time.monotonic() < end_s:
        fuzz = Fuzz(FIRST_SEED + seeds)
        seeds += 1
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # the world prints its seed for tests
                VirtualLoop().run(fuzz.play(lambda tally: tally.rounds < ROUNDS and time.monotonic() < end_s))
        except Exception as error:
            failures.append(f"seed {fuzz.tally.seed}: {type(error).__name__}: {error}")
            print(failures[-1][:2000], file=sys.stderr, flush=True)
        datagrams, heads = datagrams + fuzz.tally.datagrams, heads + fuzz.tally.heads
        total += fuzz.tally.counters
        gc.collect()
        resident.append((time.monotonic(), resident_bytes(os.getpid())))
    seconds = time.monotonic() - began_s
    # The first half fills the caches of addresses and contacts; a leak continues to grow.
    middle = next(size for at, size in resident if at >= began_s + seconds / 2 or at == resident[-1][0])
    grown_mb = (resident[-1][1] - middle) / 1e6
    dropped = {key: count for key, count in sorted(total.items()) if key.startswith(("dropped_", "requests_refused_"))}
    details = {
        "minutes": round(seconds / 60, 2),
        "seeds": seeds,
        "heads": heads,
        "resident_mb": [round(size / 1e6) for _, size in resident],
        "failures": failures,
        **dropped,
    }
    conditions = (
        f"simulated swarms of {NODES} nodes, one after another, for {minutes:g} minutes; mutated recordings and "
        f"made-up messages of every kind from strangers, made-up ids and peers' addresses; after each round of {ROUND} "
        "tables, sizes and tasks are checked and the node is asked by others"
    )
    return Outcome(
        "fuzz",
        conditions,
        [
            Series("fuzzed overlay: exceptions, foreign entries, leaks", "", [len(failures)], "≤ 0", details),
            Series("fuzzed overlay: datagrams", "", [datagrams]),
            Series("fuzzed overlay: growth of resident memory in the second half", "MB", [grown_mb], "≤ 10"),
        ],
    )
