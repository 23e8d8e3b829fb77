"""sealing: what a closed swarm costs: µs per datagram and handshake, and the throughput of TLS against plain streams.

Datagrams are sealed and opened in one process without a network. Streams run between two processes over the loopback,
plain and TLS in turns within one run: bodies of 64 MB pushed and pulled as the exchange does, and small requests.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import uvloop

from benchmarks.record import NotMeasured, Outcome, Series
from p2pnode.overlay.addresses import Address, NodeAddress
from p2pnode.overlay.identity import Identity, identity_from_seed
from p2pnode.overlay.sealing.certificate_request import make_certificates
from p2pnode.overlay.sealing.handshake import INIT, INIT_BYTES, RESPONSE, RESPONSE_BYTES, SEALED
from p2pnode.overlay.sealing.sealer import Sealer
from p2pnode.overlay.sealing.swarm_key import KeyRing, SwarmKey
from p2pnode.overlay.sealing.tickets import TicketVerifier
from p2pnode.overlay.sealing.tls import Credentials
from p2pnode.overlay.sockets.connection_pool import StreamSeal
from p2pnode.overlay.sockets.transport import SocketTransport
from p2pnode.overlay.system import SystemClock
from p2pnode.overlay.transport import Request, Response, SizedBody

REPETITIONS = 7
BODY_BYTES = 64 << 20
SLICE_BYTES = 1 << 20
SMALL_REQUESTS = 300
DATAGRAMS = 4000
CONTACTS = 200
#: A step query and its answer have about this many bytes.
DATAGRAM_BYTES = 130

_KEYS = KeyRing((SwarmKey(b"k" * 32),))
_RUN = "benchmark"
_SERVER_SEED, _CLIENT_SEED = b"s" * 32, b"c" * 32


def measure(arguments: argparse.Namespace) -> Outcome:
    repetitions = arguments.repetitions or REPETITIONS
    datagrams = [_datagram_us() for _ in range(repetitions)]
    contacts = [_handshake_us() for _ in range(repetitions)]
    streams = uvloop.run(_streams(repetitions))
    return Outcome(
        "sealing",
        f"datagrams of {DATAGRAM_BYTES} B in one process; streams between two processes over the loopback on uvloop, "
        f"plain and sealed by turns: {BODY_BYTES >> 20} MB bodies, requests one after the other; values are ratios of "
        "neighbouring runs",
        [
            Series("sealing and opening one datagram", "µs", datagrams),
            Series("refusing one junk datagram", "µs", [_junk_us() for _ in range(repetitions)]),
            Series("first contact of two nodes, both ends together", "µs", contacts),
            Series("pull of 64 MB, sealed beside plain", "", streams["pull"], aim="≥ 0.6"),
            Series("push of 64 MB, sealed beside plain", "", streams["push"], aim="≥ 0.6"),
            Series("requests per second, sealed beside plain", "", streams["small"], aim="≥ 0.6"),
            Series("pull of 64 MB, sealed", "GB/s", streams["pull GB/s"]),
        ],
    )


# -- datagrams ---------------------------------------------------------------------------------------------------


class _End:
    def __init__(self, seed: bytes) -> None:
        identity = identity_from_seed(seed)
        self.address = NodeAddress.of(Address("127.0.0.1", 1 + seed[0]), identity.node_id)
        self.sealer = Sealer(identity, _KEYS, _RUN, os.urandom, now=0.0, wall=1e9)


def _handshake(one: _End, two: _End, now: float) -> None:
    """A handshake and the first datagram."""
    (_, init), *_ = one.sealer.seal(two.address, b"\0hello", now, 1e9 + now)
    (_, response), *_ = two.sealer.open(init, one.address, now, 1e9 + now).send
    for _, sealed in one.sealer.open(response, two.address, now, 1e9 + now).send:
        two.sealer.open(sealed, one.address, now, 1e9 + now)


def _datagram_us() -> float:
    one, two = _End(_SERVER_SEED), _End(_CLIENT_SEED)
    _handshake(one, two, 1.0)
    datagram = b"\1" + os.urandom(DATAGRAM_BYTES - 1)
    began = time.perf_counter()
    for _ in range(DATAGRAMS):
        ((_, sealed),) = one.sealer.seal(two.address, datagram, 2.0, 1e9 + 2)
        if two.sealer.open(sealed, one.address, 2.0, 1e9 + 2).datagram != datagram:
            raise NotMeasured("a datagram did not arrive as it was sent")
    return (time.perf_counter() - began) / DATAGRAMS * 1e6


def _junk_us() -> float:
    """The mean over junk of all kinds and lengths, in equal parts."""
    member, source = _End(_SERVER_SEED), Address("127.0.0.1", 9)
    junk = [
        bytes([kind]) + os.urandom(size - 1)
        for kind, size in (
            (INIT, INIT_BYTES),
            (RESPONSE, RESPONSE_BYTES),
            (SEALED, 160),
            (SEALED, 1400),
            (0, 160),
        )
        for _ in range(DATAGRAMS // 5)
    ]
    began = time.perf_counter()
    for datagram in junk:
        member.sealer.open(datagram, source, 2.0, 1e9 + 2)
    elapsed = time.perf_counter() - began
    if member.sealer.counters["opened"] or member.sealer.sessions:
        raise NotMeasured("junk was accepted")
    return elapsed / len(junk) * 1e6


def _handshake_us() -> float:
    pairs = [(_End(os.urandom(32)), _End(os.urandom(32))) for _ in range(CONTACTS)]
    began = time.perf_counter()
    for one, two in pairs:
        _handshake(one, two, 1.0)
    elapsed = time.perf_counter() - began
    if any(two.sealer.counters["opened"] != 1 for _, two in pairs):
        raise NotMeasured("a handshake failed")
    return elapsed / CONTACTS * 1e6


# -- streams -----------------------------------------------------------------------------------------------------


class _Silent:
    def debug(self, event: str, **fields: Any) -> None: ...

    info = warning = error = debug


def _transport(identity: Identity, *, sealed: bool) -> SocketTransport:
    clock = SystemClock()
    seal = None
    if sealed:
        tickets = TicketVerifier(_KEYS, _RUN, identity.node_id, os.urandom, started_wall=clock.wall())
        seal = StreamSeal(tickets, Credentials.of(make_certificates(identity, _KEYS, _RUN, clock.wall())))
    return SocketTransport("127.0.0.1", 0, log=_Silent(), clock=clock, seal=seal)


def _slices() -> Iterator[memoryview]:
    buffer = memoryview(bytearray(os.urandom(SLICE_BYTES)))
    for _ in range(BODY_BYTES // SLICE_BYTES):
        yield buffer


async def _handle(incoming: Request) -> Response:
    if incoming.name == "pull":
        return Response(b"", SizedBody(_slices(), BODY_BYTES))
    received = sum([len(chunk) async for chunk in incoming.body])
    return Response(str(received).encode())


async def _serve() -> None:
    """The other process: two transports, their ports on standard output, until standard input ends."""
    transports = [_transport(identity_from_seed(_SERVER_SEED), sealed=sealed) for sealed in (False, True)]
    for transport in transports:
        await transport.open(lambda _data, _source: None, _handle)
    sys.stdout.write(" ".join(str(transport.address.port) for transport in transports) + "\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for transport in transports:
        await transport.close()


async def _streams(repetitions: int) -> dict[str, list[float]]:
    other = subprocess.Popen(  # noqa: ASYNC220 (nothing else runs here)
        [sys.executable, "-m", "benchmarks.sealing"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        ports = [int(port) for port in (await asyncio.to_thread(other.stdout.readline)).split()]
        if len(ports) != 2:
            raise NotMeasured("the other process did not start")
        server_id = identity_from_seed(_SERVER_SEED).node_id
        routes: list[tuple[SocketTransport, NodeAddress]] = []
        for sealed, port in zip((False, True), ports, strict=True):
            transport = _transport(identity_from_seed(_CLIENT_SEED), sealed=sealed)
            await transport.open(lambda _data, _source: None, _handle)
            routes.append((transport, NodeAddress.of(Address("127.0.0.1", port), server_id)))
        found: dict[str, list[float]] = {"pull": [], "push": [], "small": [], "pull GB/s": []}
        actions: dict[str, Callable[..., Any]] = {"pull": _pull, "push": _push, "small": _small}
        for action in actions.values():  # a warm-up, not measured: connections, caches, buffers
            for route in routes:
                await action(*route)
        for _ in range(repetitions):
            for name, action in actions.items():
                plain_s, sealed_s = [await action(*route) for route in routes]
                found[name].append(plain_s / sealed_s)
                if name == "pull":
                    found["pull GB/s"].append(BODY_BYTES / sealed_s / 1e9)
        for transport, _ in routes:
            await transport.close()
        return found
    finally:
        assert other.stdin is not None
        other.stdin.close()
        other.wait(timeout=30)


#: Reused, as the exchange's buffers are: fresh pages would cost more than what is measured.
_target = memoryview(np.empty(BODY_BYTES, np.uint8))


async def _pull(transport: SocketTransport, to: NodeAddress) -> float:
    target, at = _target, 0
    began = time.perf_counter()
    async with transport.request(to, "pull", b"", timeout_s=60) as answer:
        async for chunk in answer.body:
            target[at : at + len(chunk)] = chunk
            at += len(chunk)
    elapsed = time.perf_counter() - began
    if at != BODY_BYTES:
        raise NotMeasured(f"{at} bytes arrived, not {BODY_BYTES}")
    return elapsed


async def _push(transport: SocketTransport, to: NodeAddress) -> float:
    began = time.perf_counter()
    async with transport.request(to, "push", b"", SizedBody(_slices(), BODY_BYTES), timeout_s=60) as answer:
        elapsed = time.perf_counter() - began
        if int(bytes(answer.head)) != BODY_BYTES:
            raise NotMeasured("not all bytes arrived")
    return elapsed


async def _small(transport: SocketTransport, to: NodeAddress) -> float:
    head = msgspec.msgpack.encode([b"x" * 150])
    began = time.perf_counter()
    for _ in range(SMALL_REQUESTS):
        async with transport.request(to, "small", head, timeout_s=60):
            pass
    return time.perf_counter() - began


if __name__ == "__main__":
    uvloop.run(_serve())
