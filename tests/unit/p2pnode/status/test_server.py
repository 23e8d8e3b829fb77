"""The HTTP API without sockets: parameters, refusals, and errors as JSON; `tests/process/test_status_server.py` has it
with them."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from p2pnode.config.settings import StatusSettings
from p2pnode.errors import ExitCode, UserError
from p2pnode.overlay.addresses import Address
from p2pnode.status import server as module
from p2pnode.status.events import EventRing
from p2pnode.status.guard import Refusal
from p2pnode.status.limits import MAX_LIMIT, SCHEMA_HEADER
from p2pnode.status.prometheus import counter
from p2pnode.status.server import StatusServer
from tests.harness.environment.simulated import VirtualClock
from tests.harness.environment.virtual_loop import run


class Source:
    """A node that records what it is told; it leaves out the member 0xab…"""

    def __init__(self) -> None:
        self.events = EventRing()
        self.told: list[str] = []
        self.is_ready = True

    def status(self) -> Any:
        return {"state": "training"}

    def peers(self) -> Any:
        return []

    def steps(self, limit: int) -> Any:
        return list(range(limit))

    def ready(self) -> tuple[bool, str]:
        return self.is_ready, "it waits for nodes"

    def metrics(self) -> Any:
        return [counter("p2pnode_steps_total", "Steps.", 7)]

    def leave(self) -> None:
        self.told.append("leave")

    def pause(self) -> None:
        self.told.append("pause")

    def resume(self) -> None:
        self.told.append("resume")


class Asked:
    """A server that is asked without a connection."""

    def __init__(self, server: StatusServer, source: Source) -> None:
        self.server, self.source = server, source
        self.handlers = {(route.method, route.path): route.handler for route in server._routes()}

    async def __call__(self, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, Any]:
        """Status, JSON (or text) and headers of the answer."""
        request = make_mocked_request(method, path, headers={"Host": "localhost", **headers})
        handler: Any = self.handlers[method, request.path]
        found: Any = await module._json_errors(request, handler)
        body = found.body.decode()
        return found.status, json.loads(body) if found.content_type == "application/json" else body, found.headers


def play(scenario: Callable[[Asked], Awaitable[None]], host: str = "127.0.0.1") -> None:
    async def main() -> None:
        source: Any = Source()
        await scenario(Asked(StatusServer(source, StatusSettings(host=host), "token", VirtualClock()), source))

    run(main())


@pytest.mark.parametrize(
    ("given", "limit"), [("", 100), ("?limit=1", 1), (f"?limit={MAX_LIMIT + 5}", MAX_LIMIT), ("?limit=007", 7)]
)
def test_a_number_has_a_default_and_an_upper_bound(given: str, limit: int) -> None:
    """More than the bound is the bound."""

    async def scenario(asked: Asked) -> None:
        status, steps, _ = await asked(f"/steps{given}")
        assert (status, len(steps)) == (200, limit)

    play(scenario)


@pytest.mark.parametrize("given", ["0", "-1", "1.5", "", "ten", "1" * 21, "١", "%201"])
def test_any_other_number_is_named_in_the_refusal(given: str) -> None:
    """Below the least, not whole, not of ASCII digits, or too long."""

    async def scenario(asked: Asked) -> None:
        status, answer, _ = await asked(f"/steps?limit={given}")
        assert status == 400
        assert answer["error"].startswith("limit = ")
        assert answer["error"].endswith("is not a whole number from 1 up")

    play(scenario)


def test_readiness_tells_its_reason_to_those_with_the_token_alone() -> None:
    """Beyond the loopback; whether it is ready is told to all."""

    async def scenario(asked: Asked) -> None:
        assert (await asked("/readyz"))[0] == 200
        asked.source.is_ready = False
        status, stranger, _ = await asked("/readyz")
        assert (status, stranger["ready"], stranger["reason"]) == (503, False, "")
        _, known, _ = await asked("/readyz", Authorization="Bearer token")
        assert known["reason"] == "it waits for nodes"

    play(scenario, host="0.0.0.0")


def test_refused_requests_are_counted_by_status() -> None:
    """In the metrics, with those of the node; the handler of a refused one is not called."""

    async def scenario(asked: Asked) -> None:
        async def never(_: web.Request) -> Any:
            raise AssertionError

        for host, count in (("evil.example", 2), ("localhost", 1)):
            for _ in range(count):
                request = make_mocked_request("POST", "/leave", headers={"Host": host})
                admit: Any = asked.server._admit
                assert (await admit(request, never)).status in (401, 403)
        _, text, headers = await asked("/metrics")
        assert "p2pnode_steps_total 7" in text
        assert sum(asked.server._refused.values()) == 3
        for status, count in asked.server._refused.items():
            assert f'p2pnode_http_refused_total{{status="{status}"}} {count}' in text
        assert headers[SCHEMA_HEADER] == "1"

    play(scenario)


def test_a_refusal_says_when_to_come_again_and_what_to_bring() -> None:
    """Whole seconds, rounded up, and the scheme of the token."""
    response = module._refused(Refusal(429, "too many", "wait", retry_s=1.2))
    assert (response.status, response.headers["Retry-After"]) == (429, "2")
    assert "WWW-Authenticate" not in response.headers
    response = module._refused(Refusal(401, "no token", "bring one", challenge=True))
    assert response.headers["WWW-Authenticate"] == 'Bearer realm="p2pnode"'
    assert "Retry-After" not in response.headers


def test_a_port_that_cannot_be_had_says_why() -> None:
    """Without the privilege, or at an address that is not here: each with what to do."""

    async def scenario(asked: Asked) -> None:
        asked.server._settings = StatusSettings(host="192.0.2.1", port=1)
        with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1:1") as failure:
            await asked.server.start()
        assert (failure.value.exit_code, "check status.host" in failure.value.hint) == (ExitCode.CANNOT_BIND, True)

    play(scenario)
    denied = module._cannot_listen(Address("127.0.0.1", 80), PermissionError(13, "Permission denied"))
    assert "ports below 1024 need privileges" in str(denied.hint)
