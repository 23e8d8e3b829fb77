"""A peer of hivemind for `wan`: run in a namespace by the Python of an environment of its own, never imported by us.

It rests as long as a step trains, then averages with the others, and again. Matchmaking for the next averaging begins
with the rest, so that it costs no time. Each turn is a JSON line in `--notes`: when the rest began and ended (monotonic
seconds), and how many peers were averaged with (0: it failed).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

MATCHMAKING_S = 3.0
#: An averaging that does not end in so long has failed.
PATIENCE_S = 180.0


def main() -> int:
    line = argparse.ArgumentParser()
    line.add_argument("--host", required=True)
    line.add_argument("--peers", type=int, required=True)
    line.add_argument("--parameters", type=int, required=True)
    line.add_argument("--step-s", type=float, required=True)
    line.add_argument("--codec", choices=("none", "float16", "8bit"), required=True)
    line.add_argument("--notes", type=Path, required=True)
    line.add_argument("--initial", action="append", default=[])
    given = line.parse_args()

    import hivemind
    import torch
    from hivemind import compression as codecs

    torch.set_num_threads(1)
    compression = {
        "none": codecs.NoCompression,
        "float16": codecs.Float16Compression,
        "8bit": codecs.Uniform8BitQuantization,
    }[given.codec]()
    dht = hivemind.DHT(
        initial_peers=given.initial,
        start=True,
        host_maddrs=[f"/ip4/{given.host}/tcp/0"],
        nat_port_map=False,
        auto_nat=False,
        use_relay=False,
        use_auto_relay=False,
    )
    print("addresses:", *(address for address in dht.get_visible_maddrs() if given.host in str(address)), flush=True)
    averager = hivemind.DecentralizedAverager(
        [torch.randn(given.parameters)],
        dht,
        start=True,
        prefix="benchmark",
        target_group_size=given.peers,
        min_group_size=given.peers,
        min_matchmaking_time=MATCHMAKING_S,
        request_timeout=MATCHMAKING_S,
        compression=compression,
        allreduce_timeout=PATIENCE_S,
        next_chunk_timeout=PATIENCE_S,
        allow_state_sharing=False,
    )
    while True:
        control = averager.step(wait=False, require_trigger=True, timeout=PATIENCE_S)
        began_s = time.monotonic()
        time.sleep(given.step_s)
        ended_s = time.monotonic()
        with averager.get_tensors() as tensors:
            before = tensors[0][:8].clone()
        control.allow_allreduce()
        try:
            group = len(control.result(timeout=PATIENCE_S) or ())
        except Exception as error:
            print("failed:", repr(error), flush=True)
            group = 0
        with averager.get_tensors() as tensors:
            # The 8-bit codecs report success and average nothing with some versions of numpy.
            group = group if bool((tensors[0][:8] != before).any()) else 0
            tensors[0].add_(torch.randn(1).item())
        with given.notes.open("a") as file:
            file.write(json.dumps({"began_s": began_s, "ended_s": ended_s, "group": group}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
