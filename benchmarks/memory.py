"""memory: the peak of a daemon's own memory against its budget, at 25 M and 124 M parameters, alone and with one peer.

Real daemons with a trainer that takes no time (`benchmarks.gated_daemon`), default exchange, and a checkpoint under way
most of the time. Own memory is the resident memory without the two vectors shared with the trainer. The peak is that of
the kernel (VmHWM) from the start on, after so many steps that the repair log is full.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from pathlib import Path

from benchmarks.contestants import Ours, Way
from benchmarks.daemons import status
from benchmarks.gate import peak_bytes
from benchmarks.record import NotMeasured, Outcome, Series

MILLIONS = (25.0, 124.0)
CHECKPOINT_S = 1.0
FREE_STEPS = 4
#: Bytes that the repair log may take, by default.
LOG_BYTES = 256 * 1024 * 1024
#: Longest wait for a checkpoint of the largest model on a slow disk.
CHECKPOINTS_S = 300.0
AIM_BYTES = 20


def measure(arguments: argparse.Namespace) -> Outcome:
    series: list[Series] = []
    for millions in arguments.parameters or MILLIONS:
        for peers in arguments.peers or (1, 2):
            series += _measured(int(millions * 1e6), peers)
    return Outcome(
        "memory",
        "real daemons on the loopback with a stub trainer that takes no time, bfloat16 deltas, a backup, "
        f"pssp, a checkpoint {CHECKPOINT_S:g} s after the end of the last, steps until the repair log is full; own "
        "memory: the most resident memory (VmHWM) without the two vectors that are shared with the trainer, of the "
        "daemon with the most; the budget is that of /status, for a trainer that has nothing of its own",
        series,
    )


def _measured(parameters: int, peers: int) -> list[Series]:
    way = Way("bfloat16", replicas=1 if peers > 1 else 0, barrier="pssp")
    # A delta in bfloat16 has two bytes per value; a node of two logs the owned half and the backed half.
    turns = math.ceil(1.2 * LOG_BYTES / (2 * parameters) / FREE_STEPS) + 2
    with tempfile.TemporaryDirectory(prefix="p2pnode-bench-") as folder:
        group = Ours(way, peers, parameters, Path(folder), free_steps=FREE_STEPS, checkpoint_s=CHECKPOINT_S, shards=0)
        try:
            for _ in range(turns):
                group.turn()
            deadline = time.monotonic() + CHECKPOINTS_S
            while min(group.checkpoints()) < 2:
                if time.monotonic() > deadline:
                    raise NotMeasured(f"no two checkpoints of {parameters} parameters within {CHECKPOINTS_S:g} s")
                group.turn()
            found = [_of(group, number) for number in range(peers)]
        finally:
            group.stop()
    own, budget = max(found)
    label = f"{parameters / 1e6:g} M, {'alone' if peers == 1 else f'{peers} nodes'}"
    return [
        Series(f"most memory of a daemon's own, {label}", "MB", [own / 1e6], "", {"budget_mb": budget / 1e6}),
        Series(f"the same per parameter, {label}", "bytes", [own / parameters], f"≤ {AIM_BYTES}"),
        Series(f"distance of the budget from it, {label}", "%", [100 * abs(budget - own) / own], "≤ 15"),
    ]


def _of(group: Ours, number: int) -> tuple[float, float]:
    """Own memory and its budget."""
    found = status(group.nodes[number])
    if found is None:
        raise NotMeasured(f"{group.nodes[number].name} does not answer")
    memory = found["memory"]
    parts = memory["parts"]
    shared = parts["replica_bytes"] + parts["delta_bytes"]
    # The base is the trainer's, whose stub has none.
    return peak_bytes(group.pids[number]) - shared, memory["budget_bytes"] - shared - parts["base_bytes"]
