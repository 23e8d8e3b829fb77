"""Requests to etcd's JSON gateway: several endpoints with fail-over, TLS and a password where they are given.

The gateway is part of every etcd since 3.4 (`/v3/…`): keys and values are base64, 64-bit numbers are strings, and zeros
are left out. Of the Python clients one is unmaintained, one needs an old protobuf, and one is synchronous, so this
speaks HTTP through aiohttp, which the daemon has loaded for its status page.
"""

from __future__ import annotations

import asyncio
import base64
import io
import ssl
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from p2pnode.training.errors import TrainingError

Json = dict[str, Any]

#: gRPC codes after which the same request may succeed, and may have succeeded already: deadline exceeded, aborted,
#: internal, unavailable (no leader, leader changed, timed out), unknown.
_UNCERTAIN = frozenset({2, 4, 10, 13, 14})
_UNAUTHENTICATED = 16
_INVALID_ARGUMENT = 3


class EtcdUnreachable(TrainingError):
    """No endpoint answered: the request may have been executed or not. The text names the last reason."""


class EtcdRefused(TrainingError):
    """etcd executed nothing; `code` is the one of gRPC."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"etcd refused: {message} (code {code})")
        self.code = code


def coded(data: bytes) -> str:
    """Bytes as the gateway wants them."""
    return base64.b64encode(data).decode()


def decoded(text: str) -> bytes:
    return base64.b64decode(text)


class EtcdGateway:
    """The gateway of a cluster. `endpoints` are URLs such as `https://host:2379`; the one that answered last is asked
    first. `user` is a name and a password, or None."""

    def __init__(
        self,
        endpoints: Sequence[str],
        tls: ssl.SSLContext | None = None,
        user: tuple[str, str] | None = None,
    ) -> None:
        self._endpoints = list(endpoints)
        self._tls = tls
        self._user = user
        self._token = ""
        self._session: aiohttp.ClientSession | None = None

    async def call(self, path: str, body: Json, timeout_s: float) -> Json:
        """The answer to `POST /v3/<path>`: asks one endpoint after the other, for `timeout_s` together. Raises
        `EtcdUnreachable` or `EtcdRefused`."""
        reason: Exception = TimeoutError("no time left")
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        for _ in range(len(self._endpoints)):
            left_s = end - loop.time()
            if left_s <= 0:
                break
            try:
                return await self._ask(self._endpoints[0], path, body, left_s)
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError, EtcdUnreachable) as error:
                reason = error
                self._endpoints.append(self._endpoints.pop(0))
        where = ", ".join(sorted(self._endpoints))
        raise EtcdUnreachable(f"etcd at {where} does not answer: {str(reason) or type(reason).__name__}") from reason

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _ask(self, endpoint: str, path: str, body: Json, timeout_s: float) -> Json:
        if self._user is not None and not self._token:
            await self._authenticate(endpoint, timeout_s)
        try:
            return await self._post(endpoint, path, body, timeout_s)
        except EtcdRefused as error:
            stale = error.code == _UNAUTHENTICATED or (
                error.code == _INVALID_ARGUMENT and "auth" in str(error).lower() and "token" in str(error).lower()
            )
            if self._user is None or not stale:
                raise
        # Tokens end after some minutes, and with a restart of etcd.
        await self._authenticate(endpoint, timeout_s)
        return await self._post(endpoint, path, body, timeout_s)

    async def _authenticate(self, endpoint: str, timeout_s: float) -> None:
        assert self._user is not None
        name, password = self._user
        self._token = ""
        answer = await self._post(endpoint, "auth/authenticate", {"name": name, "password": password}, timeout_s)
        self._token = str(answer.get("token", ""))

    async def _post(self, endpoint: str, path: str, body: Json, timeout_s: float) -> Json:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = self._token
        async with self._session.post(
            f"{endpoint}/v3/{path}",
            # A file, because aiohttp warns of large bodies in one piece.
            data=io.BytesIO(msgspec.json.encode(body)),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            ssl=self._tls if self._tls is not None else True,
        ) as response:
            raw = await response.read()
        try:
            answer = msgspec.json.decode(raw)
        except msgspec.DecodeError:
            answer = None
        if not isinstance(answer, dict):
            raise EtcdUnreachable(f"{endpoint} answered what no etcd answers: HTTP status {response.status}")
        # A stream (keepalive) puts its one message into `result`, and its error into `error`.
        failure = answer.get("error")
        if response.status != 200 or failure is not None:
            facts = failure if isinstance(failure, Mapping) else answer
            code = int(facts.get("code", facts.get("grpc_code", 2)))
            message = str(facts.get("message") or facts.get("error") or f"HTTP status {response.status}")
            if code in _UNCERTAIN:
                raise EtcdUnreachable(f"{endpoint}: {message}")
            raise EtcdRefused(code, message)
        result = answer.get("result", answer)
        if not isinstance(result, dict):
            raise EtcdUnreachable(f"{endpoint} answered what no etcd answers")
        return result
