"""overlay_sockets: two hundred overlay nodes in one process, over real sockets on the loopback.

Real transports (UDP and HTTP) and real disks, one event loop for all of them: the figures are those of one core that
carries both ends of everything. A fresh process per repetition, so that memory is that of these nodes alone. They share
what a process has once: the code, the threads that write, and parsed addresses (`overlay.addresses`, and
`UNPACKED_CONTACTS` contacts of 0.4 KB, to whose bytes their tables refer). No proof that one node has verified spares
another one its own verification.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, NotMeasured, Outcome, Series
from benchmarks.start import resident_bytes

NODES = 200
BOOTSTRAPS = 3
REPETITIONS = 3
#: Lookups under way at one moment, and how long they are counted.
AT_ONCE = 8
LOOKUPS_S = 5.0
#: After the last has joined: pools fill with a lookup a second, and then renew slowly.
SETTLE_S = 45.0
#: A busy machine takes several times as long as a quiet one.
TIMEOUT_S = 900.0


async def swarm(nodes: int, folder: Path, lookups_s: float, settle_s: float) -> dict[str, Any]:
    """Start the nodes, look ids up, and report the cost. Times in seconds, memory in bytes."""
    from p2pnode.overlay.identity import load_identity, next_incarnation
    from p2pnode.overlay.overlay import Overlay
    from p2pnode.overlay.peers import Activity
    from p2pnode.overlay.settings import LivenessSettings, NodeSettings, OverlaySettings, SwarmSettings
    from p2pnode.overlay.sockets.transport import SocketTransport
    from p2pnode.overlay.system import FolderDisk, SystemClock, SystemEntropy, ThreadExecutor
    from tests.harness.environment.simulated import NoLog, make_environment

    # As in a daemon, threads write to the disk: one pool of them for all nodes.
    clock, entropy, log, executor = SystemClock(), SystemEntropy(), NoLog(), ThreadExecutor()

    def make(number: int) -> Overlay:
        disk = FolderDisk(folder / str(number))
        return Overlay(
            identity=load_identity(disk, entropy),
            incarnation=next_incarnation(disk, clock.wall()),
            boot_id=int.from_bytes(entropy.token(8), "big"),
            settings=OverlaySettings(
                NodeSettings(host="127.0.0.1", port=0), SwarmSettings(run="benchmark"), LivenessSettings()
            ),
            transport=SocketTransport("127.0.0.1", 0, log=log, clock=clock),
            environment=make_environment(clock=clock, entropy=entropy, disk=disk, executor=executor, log=log),
        )

    before_bytes = resident_bytes(os.getpid())
    overlays = [make(number) for number in range(nodes)]
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    await overlays[0].start()
    overlays[0].found(b"genesis of bench")

    async def join(overlay: Overlay, through: list[Overlay]) -> None:
        await overlay.start()
        await overlay.join([str(other.address) for other in through], genesis=None)
        overlay.announce(activity=Activity.TRAINING, step_seconds=60.0)

    first = overlays[:BOOTSTRAPS]
    for overlay in first[1:]:
        await join(overlay, first[:1])
    await asyncio.gather(*(join(overlay, first) for overlay in overlays[BOOTSTRAPS:]))
    joined_s, joined_cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    proofs = sum(overlay._protocol.counters["proofs_made"] for overlay in overlays)
    await asyncio.sleep(settle_s)
    rng = random.Random(1)
    took_s: list[float] = []
    right = 0
    ends_s = time.monotonic() + lookups_s

    async def look_up() -> None:
        nonlocal right
        while time.monotonic() < ends_s:
            asker, wanted = rng.sample(overlays, 2)
            one_s = time.monotonic()
            found = await asker.lookup(wanted.node_id)
            took_s.append(time.monotonic() - one_s)
            right += bool(found) and found[0].node_id == wanted.node_id

    looking_s = time.monotonic()
    await asyncio.gather(*(look_up() for _ in range(AT_ONCE)))
    looking_s = time.monotonic() - looking_s
    memory_bytes = resident_bytes(os.getpid()) - before_bytes
    peers = [len(overlay.peers) for overlay in overlays]
    dead = sum(len(overlay._members.dead_contacts) for overlay in overlays)
    await asyncio.gather(*(overlay.stop() for overlay in overlays))
    ordered = sorted(took_s)
    return {
        "joined_s": joined_s,
        "joined_cpu_s": joined_cpu_s,
        "proofs_per_node": proofs / nodes,
        "peers_per_node": statistics.median(peers),
        "memory_bytes_per_node": memory_bytes / nodes,
        "lookups": len(took_s),
        "lookups_per_s": len(took_s) / looking_s,
        "right": right / len(took_s),
        "p50_s": statistics.median(took_s),
        "p99_s": ordered[int(0.99 * len(ordered))],
        "false_deaths": dead,
    }


def main() -> None:
    """In a process of its own: one swarm, one JSON line."""
    import uvloop

    nodes, lookups_s, settle_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(swarm(nodes, Path(folder), lookups_s, settle_s))))


def run(nodes: int, lookups_s: float = LOOKUPS_S, settle_s: float = SETTLE_S) -> dict[str, Any]:
    """One swarm in a fresh process. Raises `NotMeasured`."""
    command = [sys.executable, "-m", "benchmarks.overlay_sockets", str(nodes), str(lookups_s), str(settle_s)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise NotMeasured(f"the swarm of {nodes} nodes ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(arguments: argparse.Namespace) -> Outcome:
    nodes = arguments.nodes or NODES
    found = [run(nodes) for _ in range(arguments.repetitions or REPETITIONS)]
    conditions = (
        f"{nodes} overlay nodes in one process on one uvloop, loopback, all at one moment through {BOOTSTRAPS} "
        f"bootstraps; memory: growth of VmRSS per node; then {AT_ONCE} lookups of random nodes' ids at a time for "
        f"{LOOKUPS_S:g} s, beside the nodes' own probes and lookups"
    )
    return Outcome(
        "overlay_sockets",
        conditions,
        [
            Series(
                f"{nodes} nodes on real sockets: start to all joined", "s", [one["joined_s"] for one in found], "≤ 8"
            ),
            Series(
                f"{nodes} nodes on real sockets: processor time until all have joined",
                "s",
                [one["joined_cpu_s"] for one in found],
            ),
            Series(
                f"{nodes} nodes on real sockets: proofs that a node has made when all have joined",
                "",
                [one["proofs_per_node"] for one in found],
            ),
            Series("peers of an overlay node, median", "", [one["peers_per_node"] for one in found]),
            Series("memory of an overlay node", "KiB", [one["memory_bytes_per_node"] / 1024 for one in found], "≤ 120"),
            Series("lookups, all nodes on one core", "1/s", [one["lookups_per_s"] for one in found]),
            Series("lookup, median", "ms", [1000 * one["p50_s"] for one in found]),
            Series("lookup, 99 %", "ms", [1000 * one["p99_s"] for one in found]),
            Series("lookups right", "%", [100 * one["right"] for one in found], aim="≥ 99.9"),
            Series("nodes falsely held for dead", "", [one["false_deaths"] for one in found], aim="≤ 0"),
        ],
    )


if __name__ == "__main__":
    main()
