"""Requests to etcd's JSON gateway, answered by a server on the loopback: which errors are certain, fail-over, tokens.

A real etcd, TLS and a real password: tests/process/test_etcd_store.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from p2pnode.training.dispatch.etcd_gateway import EtcdGateway, EtcdRefused, EtcdUnreachable, coded, decoded
from tests.harness.runner.stories import played_by

LIMIT_S = 60.0
#: The path of a request, its body, and its token; gives a status and a body.
Answer = Callable[[str, dict[str, Any], str], tuple[int, bytes]]


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    async def handle(request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        status, raw = answer(request.path.removeprefix("/v3/"), body, request.headers.get("Authorization", ""))
        return web.Response(status=status, body=raw)

    app = web.Application()
    app.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


async def answered(status: int, raw: bytes) -> dict[str, Any]:
    async with serving(lambda *_: (status, raw)) as endpoint:
        gateway = EtcdGateway([endpoint])
        try:
            return await gateway.call("kv/range", {}, LIMIT_S)
        finally:
            await gateway.close()
            await gateway.close()


def test_bytes_are_coded_as_the_gateway_wants_them() -> None:
    """Any bytes come back."""
    assert coded(b"\x00key") == "AGtleQ=="
    assert decoded(coded(bytes(range(256)))) == bytes(range(256))


@played_by(run)
async def test_an_answer_is_given_and_that_of_a_stream_is_unpacked() -> None:
    """A renewal of a lease is a stream of one message."""
    assert await answered(200, b'{"count": "3"}') == {"count": "3"}
    assert await answered(200, b'{"result": {"TTL": "9"}}') == {"TTL": "9"}
    assert await answered(200, b"{}") == {}


@pytest.mark.parametrize(
    ("status", "raw", "code"),
    [
        (400, b'{"error": "too large", "code": 3, "message": "request is too large"}', 3),
        (200, b'{"error": {"grpc_code": 5, "message": "lease not found"}}', 5),
        (429, b'{"code": 8, "message": "database space exceeded"}', 8),
    ],
)
@played_by(run)
async def test_what_etcd_did_not_execute_is_refused_with_its_code(*, status: int, raw: bytes, code: int) -> None:
    """Of a stream too, whose status is that of success."""
    with pytest.raises(EtcdRefused, match="etcd refused: ") as refused:
        await answered(status, raw)
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("status", "raw"),
    [
        (503, b'{"code": 14, "message": "no leader"}'),
        (408, b'{"code": 4, "message": "deadline exceeded"}'),
        (500, b"{}"),
        (200, b"<html>"),
        (200, b"[]"),
        (200, b'{"result": 3}'),
        (502, b""),
    ],
)
@played_by(run)
async def test_what_may_have_been_executed_is_no_refusal(*, status: int, raw: bytes) -> None:
    """Nor an answer that no etcd gives: the caller has to find out."""
    with pytest.raises(EtcdUnreachable, match="does not answer"):
        await answered(status, raw)


@played_by(run)
async def test_the_endpoint_that_answered_last_is_asked_first() -> None:
    """One that refuses connections is passed over, and then left."""
    seen: list[str] = []
    async with serving(lambda path, *_: (seen.append(path), (200, b"{}"))[1]) as endpoint:
        gateway = EtcdGateway(["http://127.0.0.1:1", endpoint])
        await gateway.call("kv/range", {}, LIMIT_S)
        assert gateway._endpoints == [endpoint, "http://127.0.0.1:1"]
        await gateway.call("kv/txn", {}, LIMIT_S)
        assert seen == ["kv/range", "kv/txn"]
        await gateway.close()
    gateway = EtcdGateway(["http://127.0.0.1:1", "http://127.0.0.1:2"])
    with pytest.raises(EtcdUnreachable, match=r"etcd at http://127\.0\.0\.1:1, http://127\.0\.0\.1:2 does not"):
        await gateway.call("kv/range", {}, LIMIT_S)
    with pytest.raises(EtcdUnreachable, match="no time left"):
        await gateway.call("kv/range", {}, 0.0)
    await gateway.close()


@pytest.mark.parametrize("stale", [(401, 16, "invalid token"), (400, 3, "etcdserver: invalid auth token")])
@played_by(run)
async def test_a_token_that_has_ended_is_fetched_again_once(*, stale: tuple[int, int, str]) -> None:
    """The request is repeated with the new one; without a user it is refused at once."""
    status, code, message = stale
    seen: list[tuple[str, str]] = []
    valid = ["first"]

    def answer(path: str, body: dict[str, Any], token: str) -> tuple[int, bytes]:
        seen.append((path, token))
        if path == "auth/authenticate":
            assert body == {"name": "root", "password": "secret"}
            return 200, msgspec.json.encode({"token": valid[0]})
        if token != valid[0]:
            return status, msgspec.json.encode({"code": code, "message": message})
        return 200, b"{}"

    async with serving(answer) as endpoint:
        gateway = EtcdGateway([endpoint], user=("root", "secret"))
        await gateway.call("kv/range", {}, LIMIT_S)
        valid[0] = "second"
        await gateway.call("kv/range", {}, LIMIT_S)
        await gateway.close()
        assert seen == [
            ("auth/authenticate", ""),
            ("kv/range", "first"),
            ("kv/range", "first"),
            ("auth/authenticate", ""),
            ("kv/range", "second"),
        ]
        nobody = EtcdGateway([endpoint])
        with pytest.raises(EtcdRefused):
            await nobody.call("kv/range", {}, LIMIT_S)
        await nobody.close()
