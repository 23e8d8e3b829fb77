"""Invalid bytes from unauthenticated peers at two daemons: steps continue, memory stays bounded, no traceback."""

from __future__ import annotations

import contextlib
import http.client
import random
import re
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pnode.client import find
from p2pnode.overlay.sockets.framing import HEADER, IN_CHUNKS, MAGIC
from tests.process.harness.swarm_world import SHORT_STEPS, START_S, TRAINER, ProcessNode, kill_all, until

#: What all of the junk together may add to a daemon's resident memory, in MiB; the junk itself is some 30.
GROWTH_MIB = 64.0
SEED = 20


Pair = tuple[ProcessNode, ProcessNode]


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def status_address(node: ProcessNode) -> tuple[str, int]:
    found = find(node.state_dir)
    assert found is not None
    return host_and_port(str(found.address))


def resident_mib(node: ProcessNode) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{node.process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    settings = {**SHORT_STEPS, "training.checkpoint_s": 0}
    started = [ProcessNode(tmp_path, "first", settings, script=TRAINER, forks=True)]
    try:
        until(lambda: bool(started[0].address), START_S, "the founder can be asked")
        address = started[0].address
        started.append(ProcessNode(tmp_path, "second", settings, bootstrap=address, script=TRAINER, forks=True))
        until(lambda: all(node.step > 2 for node in started), START_S, "both train")
        yield started[0], started[1]
    finally:
        kill_all(started)


def junk_datagrams(to: tuple[str, int], source: random.Random) -> None:
    """Random ones of every length, prefixes of plausible ones, and the largest that UDP carries."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(1500):
            sender.sendto(source.randbytes(source.randrange(0, 600)), to)
        # Kademlia's framing: request or response, a message id, then msgpack; cut off anywhere, or nested without end.
        for kind in (b"\x00", b"\x01"):
            whole = kind + source.randbytes(20) + b"\x94\xc4\x08" + source.randbytes(8) + b"\x9f" + b"\xa4ping" * 20
            for length in range(len(whole)):
                sender.sendto(whole[:length], to)
            sender.sendto(kind + source.randbytes(20) + b"\x91" * 50_000, to)
            sender.sendto(kind + source.randbytes(20) + b"\xdd\xff\xff\xff\xff", to)
        for _ in range(50):
            sender.sendto(source.randbytes(60_000), to)


def junk_streams(to: tuple[str, int], source: random.Random) -> list[socket.socket]:
    """Bytes of other protocols, absurd headers, wrong lengths; returns the half-open connections, to be kept open."""

    def push(head_bytes: int, body_bytes: int, name: bytes = b"push", kind: int = 0) -> bytes:
        return HEADER.pack(MAGIC, kind, False, len(name), head_bytes, body_bytes) + name

    messages = [
        source.randbytes(100_000),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + source.randbytes(500),
        b"GET / HTTP/1.1\r\nHost: " + b"a" * 1_000_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % number for number in range(20_000)) + b"\r\n",
        push(5, 1 << 63) + b"short",
        push(5, 10, kind=9) + b"short",
        push(5, 10, kind=1) + source.randbytes(15),
        push(5, IN_CHUNKS) + b"short" + b"\xff" * 8 + b"x",
        # The length of the head is a lie of four gigabytes, or of two.
        push(0xFFFFFFFF, 1000) + source.randbytes(1000),
        push(0x7FFFFFFF, 1000) + source.randbytes(1000),
        push(900, 100) + source.randbytes(1000),
        push(0, 0, b"../../etc/passwd"),
        push(0, 0, b"\xff" * 255),
        push(196, 0, b"hello") + b"\x91" * 196,
    ]
    held = []
    for message in messages:
        connection = socket.create_connection(to, timeout=60)
        with contextlib.suppress(OSError):  # The node may close the connection in the middle.
            connection.sendall(message)
        held.append(connection)
    for number in range(60):
        connection = socket.create_connection(to, timeout=60)
        connection.sendall(push(900, 100)[:number])
        held.append(connection)
    for connection in held[:7]:
        # Reset instead of a farewell.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    return held[7:]


def unasked_posts(to: tuple[str, int]) -> list[int]:
    """Statuses of what a foreign page in the user's browser could send to the HTTP API."""
    seen = []
    for path, headers in [
        ("/leave", {}),
        ("/pause", {}),
        ("/leave", {"X-P2PNode": "1", "Host": "evil.example"}),
        ("/leave", {"X-P2PNode": "1", "Origin": "http://evil.example"}),
        ("/leave", {"Content-Length": "99999999"}),
    ]:
        connection = http.client.HTTPConnection(*to, timeout=60)
        connection.request("POST", path, headers=headers)
        seen.append(connection.getresponse().status)
        connection.close()
    return seen


@pytest.mark.timeout(600)
def test_junk_neither_stops_nor_fills_a_daemon(pair: Pair) -> None:
    """Datagrams, streams and requests that are none: both step on, count each other, and leave with 0 at the end."""
    print("seed", SEED)
    source = random.Random(SEED)
    target, other = pair
    until(lambda: target.status()["population"]["estimate"] == 2, 90, "they count each other")
    before_mib = {node: resident_mib(node) for node in pair}
    incarnations = {node: node.status()["node"]["incarnation"] for node in pair}
    held: list[socket.socket] = []
    try:
        for node in pair:
            junk_datagrams(host_and_port(node.address), source)
            held += junk_streams(host_and_port(node.address), source)
            assert unasked_posts(status_address(node)) == [403, 403, 403, 403, 413]
        # With the half-open connections still there.
        steps = {node: node.step for node in pair}
        until(lambda: all(node.step >= steps[node] + 10 for node in pair), 90, "both step on")
        for node in pair:
            assert node.process.poll() is None
            assert node.status()["population"]["estimate"] == 2
            assert node.status()["state"] in ("training", "waiting")
            assert node.status()["node"]["incarnation"] == incarnations[node]
            assert resident_mib(node) - before_mib[node] < GROWTH_MIB
    finally:
        for connection in held:
            connection.close()
    other.process.send_signal(signal.SIGTERM)
    assert other.process.wait(60) == 0
    target.process.send_signal(signal.SIGTERM)
    assert target.process.wait(60) == 0
    for node in pair:
        assert "Traceback" not in node.output(), node.output()
        assert '"level": "error"' not in node.output(), node.output()
