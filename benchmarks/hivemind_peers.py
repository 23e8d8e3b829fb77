"""hivemind's averaging for `peers`: run by the Python of an environment of its own, never imported by the project.

`unshare --net` must be around it (the harness sees to that): hivemind's daemon maps ports, looks for relays and asks
outside hosts whether it is reachable, unless that is turned off. It is, and this peer too has only the loopback.
Matchmaking comes before the gate and is not timed: a turn is from the trigger of an agreed group to the result of all
peers.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from gate_peer import Peer

MATCHMAKING_S = 5.0
#: A group that does not come together, or an averaging that does not end, fails the turn.
PATIENCE_S = 60.0


def peer(given: argparse.Namespace) -> None:
    import hivemind
    import torch
    from hivemind import compression as codecs
    from hivemind.averaging.control import AveragingStage

    torch.set_num_threads(1)
    compression = {
        "none": codecs.NoCompression,
        "float16": codecs.Float16Compression,
        "8bit": codecs.Uniform8BitQuantization,
    }[given.codec]()
    dht = hivemind.DHT(
        initial_peers=given.initial,
        start=True,
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        nat_port_map=False,
        auto_nat=False,
        use_relay=False,
        use_auto_relay=False,
    )
    if given.rank == 0:
        print(*dht.get_visible_maddrs(), flush=True)
    averager = hivemind.DecentralizedAverager(
        [torch.randn(given.parameters)],
        dht,
        start=True,
        prefix="benchmark",
        target_group_size=given.peers,
        min_group_size=given.peers,
        min_matchmaking_time=MATCHMAKING_S,
        compression=compression,
        allreduce_timeout=PATIENCE_S,
        next_chunk_timeout=PATIENCE_S,
        allow_state_sharing=False,
    )
    gate = Peer(given.gate)
    while True:
        step = averager.step(wait=False, require_trigger=True, timeout=PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while step.stage != AveragingStage.AWAITING_TRIGGER and time.monotonic() < deadline and not step.done():
            time.sleep(0.02)
        if not gate.ready():
            return
        with averager.get_tensors() as tensors:
            before = tensors[0][:8].clone()
        step.allow_allreduce()
        group = step.result(timeout=PATIENCE_S)
        if group is None or len(group) != given.peers:
            gate.failed(f"a group of {0 if group is None else len(group)}")
            continue
        gate.done()
        with averager.get_tensors() as tensors:
            if given.rank == 0:
                # The 8-bit codecs report success and average nothing with some versions of numpy.
                print("values changed:", bool((tensors[0][:8] != before).any()), flush=True)
            tensors[0].add_(torch.randn(1).item())


def main() -> int:
    line = argparse.ArgumentParser()
    line.add_argument("--gate", required=True)
    line.add_argument("--peers", type=int, required=True)
    line.add_argument("--parameters", type=int, required=True)
    line.add_argument("--codec", choices=("none", "float16", "8bit"), default="none")
    line.add_argument("--rank", type=int, default=-1)
    line.add_argument("--initial", action="append", default=[])
    given = line.parse_args()
    if given.rank >= 0:
        peer(given)
        return 0
    # Each a program of its own: hivemind forks, and multiprocessing's own children would hand it another method.
    founder = subprocess.Popen([sys.executable, *sys.argv, "--rank", "0"], stdout=subprocess.PIPE, text=True)
    initial = [f"--initial={address}" for address in founder.stdout.readline().split()]
    others = [
        subprocess.Popen([sys.executable, *sys.argv, "--rank", str(rank), *initial]) for rank in range(1, given.peers)
    ]
    for text in founder.stdout:
        print(text, end="", flush=True)
    for process in (founder, *others):
        process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
