"""Static references for `peers`: `python -m benchmarks.limits KIND --gate PATH --peers N --parameters P`.

`gloo` is torch.distributed's all-reduce; `sockets` moves a ring all-reduce's bytes with blocking sockets, from warm
buffers into warm buffers and without arithmetic; `copy` copies the vector once, in one process alone. None tolerates
the loss of a peer.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.gate_peer import Peer

SLICE_BYTES = 1 << 20


def serve(gate: str, act: Callable[[], None]) -> None:
    """Take turns until the harness ends."""
    peer = Peer(gate)
    while peer.ready():
        act()
        peer.done()


def gloo(rank: int, peers: int, parameters: int, gate: str, place: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/rendezvous", rank=rank, world_size=peers)
    vector = torch.randn(parameters)
    serve(gate, lambda: dist.all_reduce(vector.mul_(1.0 / peers)))


def sockets(rank: int, peers: int, parameters: int, gate: str, place: str) -> None:
    """Send 2·(N−1)/N of the vector to the next peer while as much comes from the one before."""
    if peers == 1:
        raise SystemExit("a ring has two peers at least")
    listener = socket.create_server(("127.0.0.1", 0))
    Path(place, f"port-{rank}.tmp").write_text(str(listener.getsockname()[1]))
    Path(place, f"port-{rank}.tmp").rename(Path(place, f"port-{rank}"))
    following = Path(place, f"port-{(rank + 1) % peers}")
    while not following.exists():
        threading.Event().wait(0.02)
    after = socket.create_connection(("127.0.0.1", int(following.read_text())))
    before, _ = listener.accept()
    size = 2 * (peers - 1) * 4 * parameters // peers
    outgoing, incoming = (memoryview(np.ones(size, np.uint8)) for _ in range(2))

    def send() -> None:
        for start in range(0, size, SLICE_BYTES):
            after.sendall(outgoing[start : start + SLICE_BYTES])

    def act() -> None:
        sending = threading.Thread(target=send)
        sending.start()
        filled = 0
        while filled < size:
            filled += before.recv_into(incoming[filled : filled + SLICE_BYTES])
        sending.join()

    serve(gate, act)


def copy(_rank: int, _peers: int, parameters: int, gate: str, _place: str) -> None:
    source, target = (np.ones(parameters, np.float32) for _ in range(2))
    serve(gate, lambda: np.copyto(target, source))


KINDS = {"gloo": gloo, "sockets": sockets, "copy": copy}


def main() -> int:
    line = argparse.ArgumentParser()
    line.add_argument("kind", choices=KINDS)
    line.add_argument("--gate", required=True)
    line.add_argument("--peers", type=int, required=True)
    line.add_argument("--parameters", type=int, required=True)
    given = line.parse_args()
    spawning = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="p2pnode-bench-") as place:
        arguments = [(rank, given.peers, given.parameters, given.gate, place) for rank in range(given.peers)]
        processes = [spawning.Process(target=KINDS[given.kind], args=one) for one in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
