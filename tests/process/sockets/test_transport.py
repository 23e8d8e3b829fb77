"""Messages over real sockets: heads and bodies arrive as sent, over IPv4 and IPv6."""

from __future__ import annotations

import asyncio
import time

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.transport import (
    MAX_HEAD_BYTES,
)
from tests.harness.runner.stories import played_by, run_by
from tests.process.harness.sockets import (
    LATE_S,
    LOCAL,
    MB,
    Node,
    ask,
    failure,
    has_ipv6,
    paced,
    pattern,
    run,
)

__all__ = ["paced", "run"]


@run_by("run")
async def test_round_trip() -> None:
    """A head and a body arrive in both directions; the source of a request is the caller's host."""
    async with Node() as one, Node() as two:
        assert await ask(one, two.address, "echo", b"head", [b"abc", b"", b"def"]) == (b"head", b"abcdef")
        assert await ask(one, two.address, "echo") == (b"", b"")
        assert two.sources[0].host == LOCAL


@run_by("run")
async def test_stream_of_20_mb_both_ways() -> None:
    """20 MB arrive unchanged in both directions although the sender overwrites its buffer for every chunk."""
    total = 20 * MB + 12345
    expected = b"".join(map(bytes, pattern(total)))
    async with Node() as one, Node() as two:
        _, back = await ask(one, two.address, "echo", b"", pattern(total))
        assert back == expected
        _, given = await ask(one, two.address, "give", str(total).encode())
        assert given == expected


@run_by("run")
async def test_small_views_may_be_reused() -> None:
    """Small chunks in views of one reused buffer arrive with the contents they had when they were sent."""
    async with Node() as one, Node() as two:
        _, back = await ask(one, two.address, "echo", b"", pattern(200_000, 1000))
        assert back == b"".join(map(bytes, pattern(200_000, 1000)))


@run_by("run")
async def test_list_of_views() -> None:
    """A body given as a list, also of views of numbers, is sent with its length and arrives whole."""
    numbers = memoryview(bytearray(4 * 300_000)).cast("f")
    async with Node() as one, Node() as two:
        head, _ = await ask(one, two.address, "count", b"", [numbers, b"end"])
        assert head == str(4 * 300_000 + 3).encode()


@run_by("run")
async def test_large_head() -> None:
    """A head of half a megabyte passes; one above the limit is refused before it is sent."""
    async with Node() as one, Node() as two:
        head, _ = await ask(one, two.address, "echo", b"h" * (MB // 2), [b"body"])
        assert len(head) == MB // 2
        with pytest.raises(ValueError, match="at most"):
            one.transport.request(two.address, "echo", bytes(MAX_HEAD_BYTES + 1), timeout_s=1)


@run_by("run")
async def test_many_at_once() -> None:
    """Each of 300 concurrent requests gets its own response."""
    async with Node() as one, Node() as two:
        answers = await asyncio.gather(*(ask(one, two.address, "echo", str(n).encode()) for n in range(300)))
        assert [int(head) for head, _ in answers] == list(range(300))


@run_by("run")
async def test_a_request_to_oneself() -> None:
    """A node can send a request to itself."""
    async with Node() as one:
        assert await ask(one, one.address, "echo", b"me") == (b"me", b"")


@played_by("paced")
async def test_closing_during_a_transfer(pace_s: float) -> None:
    """During a body, a peer that closes is a `reset` and the own `close` is `closed`, both within a second."""
    for closes in ("peer", "self"):
        async with Node() as one, Node() as two:

            async def transfer(one: Node, two: Node, started: asyncio.Event) -> None:
                async with one.transport.request(
                    two.address, "give", str(2000 * MB).encode(), timeout_s=LATE_S
                ) as answer:
                    async for _ in answer.body:
                        started.set()
                        await asyncio.sleep(0.001)

            started = asyncio.Event()
            task = asyncio.ensure_future(transfer(one, two, started))
            await started.wait()
            began = time.monotonic()
            await (two if closes == "peer" else one).transport.close()
            assert time.monotonic() - began < 2.5 * pace_s
            error = await failure(task)
            assert error.kind == ("reset" if closes == "peer" else "closed")


@run_by("run")
async def test_closed_transport() -> None:
    """After `close`, which may be called again, requests are `closed` and datagrams are dropped."""
    async with Node() as one, Node() as two:
        await one.transport.close()
        await one.transport.close()
        assert (await failure(ask(one, two.address, "echo"))).kind == "closed"
        one.transport.send(two.address, b"nothing")


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback on this machine")
@run_by("run")
async def test_ipv6_loopback() -> None:
    """Requests and datagrams pass over IPv6."""
    async with Node("::1") as one, Node("::1") as two:
        assert await ask(one, two.address, "echo", b"six") == (b"six", b"")
        one.transport.send(two.address, b"hello")
        async with asyncio.timeout(60):
            assert await two.datagrams.get() == (b"hello", one.address)
        assert two.sources[0].host == "::1"


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback on this machine")
@run_by("run")
async def test_dual_stack() -> None:
    """A node on "::" is reached over IPv4, sees IPv4 sources as IPv4, and can answer them."""
    async with Node() as one, Node("::") as both:
        assert await ask(one, Address(LOCAL, both.address.port), "echo", b"4") == (b"4", b"")
        assert both.sources[0].host == LOCAL
        one.transport.send(Address(LOCAL, both.address.port), b"ping")
        async with asyncio.timeout(60):
            data, source = await both.datagrams.get()
            assert (data, source) == (b"ping", one.address)
            both.transport.send(source, b"pong")
            assert (await one.datagrams.get())[0] == b"pong"
        assert await ask(both, one.address, "echo", b"back") == (b"back", b"")
