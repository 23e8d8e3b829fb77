"""The HTTP API over a real socket: its answers, its refusals, and its end."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from p2pnode.client import NodeClient, NotReachable
from p2pnode.config.settings import StatusSettings
from p2pnode.errors import ExitCode, UserError
from p2pnode.overlay.system import SystemClock
from p2pnode.status import server as status_server
from p2pnode.status.server import StatusServer
from tests.harness.runner.stories import played_by
from tests.process.harness.served_status import HEADER, POST, TOKEN, Asked, served


@played_by(served)
async def test_status_carries_the_schema_and_plain_json(asked: Asked) -> None:
    """/status has the documented keys and a schema number; a loss that is not a number is null, not invalid JSON."""
    response = await asked("GET", "/status")
    assert response.status == 200
    assert response.headers["content-type"].startswith("application/json")
    assert response.headers["x-p2pnode-schema"] == "1"
    assert response.json["schema"] == 1
    assert response.json["training"]["loss"] is None
    assert response.json["node"]["address"] == "127.0.0.1:1"


@played_by(served)
async def test_peers_and_steps_are_lists(asked: Asked) -> None:
    """/peers and /steps are bare lists; limit cuts the steps to the newest."""
    assert (await asked("GET", "/peers")).json[0]["lag"] == 1
    assert len((await asked("GET", "/steps")).json) == 5
    assert (await asked("GET", "/steps?limit=2")).json == [{"step": 4}, {"step": 5}]
    assert len((await asked("GET", "/steps?limit=99999")).json) == 5


@played_by(served, "unready")
async def test_health_is_about_the_process_and_readiness_about_the_work(asked: Asked) -> None:
    """/healthz answers while the process runs; /readyz is 503 with the reason until the node trains."""
    assert (await asked("GET", "/healthz")).status == 200
    ready = await asked("GET", "/readyz")
    assert (ready.status, ready.json["reason"]) == (503, "it waits for nodes: have 1, need 3")


@played_by(served)
async def test_events_come_by_number(asked: Asked) -> None:
    """Those above a number; the loss of the ring is counted."""
    ring = asked.source.events
    ring.add("info", "one", {"peer": b"\x01"}, wall=1.0)
    first = (await asked("GET", "/events?since=0")).json
    assert first["events"] == [{"id": 1, "time": 1.0, "level": "info", "event": "one", "fields": {"peer": "01"}}]
    assert (first["last"], first["dropped"], first["schema"]) == (1, 0, 1)
    assert (await asked("GET", "/events?since=1")).json["events"] == []


@played_by(served)
async def test_requests_reach_the_node_only_with_the_header_and_the_token(asked: Asked) -> None:
    """POST asks the node and is accepted; without the header that no form can send, or the token, it is refused."""
    for path in ("/pause", "/resume", "/leave"):
        refused = await asked("POST", path, {"Authorization": f"Bearer {TOKEN}"})
        assert refused.status == 403
        assert "X-P2PNode" in refused.json["error"]
        for given in ({}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": f"Basic {TOKEN}"}):
            refused = await asked("POST", path, HEADER | given)
            assert (refused.status, refused.headers["www-authenticate"]) == (401, 'Bearer realm="p2pnode"')
            assert "status.token" in refused.json["hint"]
            assert TOKEN not in refused.body.decode()
    assert asked.source.requests == []
    counted = (await asked("GET", "/metrics")).body.decode()
    assert 'p2pnode_http_refused_total{status="401"} 9' in counted
    assert 'p2pnode_http_refused_total{status="403"} 3' in counted
    for path in ("/pause", "/resume", "/leave", "/leave"):
        assert (await asked("POST", path, POST)).status == 202
    assert asked.source.requests == ["pause", "resume", "leave", "leave"]


@pytest.mark.parametrize("host", ["evil.example:80", ""])
@played_by(served)
async def test_a_foreign_host_header_is_refused(asked: Asked, *, host: str) -> None:
    """A name that was made to point at the loopback (DNS rebinding) gets nothing, not even to read."""
    response = await asked("GET", "/status", {"Host": host})
    assert response.status in (400, 403)
    assert b"training" not in response.body


@pytest.mark.parametrize("host", ["LOCALHOST:1", "[::1]"])
@played_by(served)
async def test_names_of_the_loopback_are_accepted(asked: Asked, *, host: str) -> None:
    """A tunnel or a container may change the port; the name stays this machine's."""
    assert (await asked("GET", "/status", {"Host": host})).status == 200


@played_by(served)
async def test_a_foreign_page_cannot_steer_the_node(asked: Asked) -> None:
    """A POST with another site's Origin is refused even with the header; the node's own page may."""
    for origin in ("http://evil.example", "null", "https://" + asked.address):
        assert (await asked("POST", "/leave", POST | {"Origin": origin})).status == 403
    assert asked.source.requests == []
    assert (await asked("POST", "/leave", POST | {"Origin": f"http://{asked.address}"})).status == 202


@pytest.mark.parametrize(
    ("method", "path", "status", "word"),
    [
        ("GET", "/nothing", 404, "there is no /nothing"),
        ("GET", "/leave", 405, "/leave does not take GET"),
        ("POST", "/status", 405, "/status does not take POST"),
        ("DELETE", "/status", 405, "does not take DELETE"),
        ("GET", "/steps?limit=0", 400, "limit"),
        ("GET", "/steps?limit=-1", 400, "limit"),
        ("GET", "/steps?limit=many", 400, "limit = 'many' is not a whole number from 1 up"),
        ("GET", "/steps?limit=%D9%A1", 400, "limit"),
        ("GET", "/steps?limit=%201", 400, "limit"),
        ("GET", "/steps?limit=" + "9" * 5000, 400, "limit"),
        ("GET", "/events?since=x", 400, "since"),
        ("GET", "/events?limit=1.5", 400, "limit"),
    ],
)
@played_by(served)
async def test_wrong_requests_get_json_errors(asked: Asked, *, method: str, path: str, status: int, word: str) -> None:
    """Every refusal is JSON with the schema and a sentence."""
    response = await asked(method, path, POST)
    assert response.status == status
    assert word in response.json["error"]
    assert response.json["schema"] == 1


@played_by(served)
async def test_large_bodies_are_refused(asked: Asked) -> None:
    """No client can make the daemon keep a body that it does not need."""
    assert (await asked("POST", "/pause", POST, b"x" * 5000)).status == 413
    assert (await asked("POST", "/pause", POST, b"x" * 100)).status == 202


def test_a_fault_of_the_source_is_an_answer_too(caplog: pytest.LogCaptureFixture) -> None:
    """A source that raises gives 500 with the kind of the error, and the server continues."""

    async def scenario(asked: Asked) -> None:
        def broken() -> Any:
            raise ZeroDivisionError("secret")

        asked.source.peers = broken
        response = await asked("GET", "/peers")
        assert (response.status, response.json["error"]) == (500, "ZeroDivisionError while answering /peers")
        assert (await asked("GET", "/status")).status == 200

    served(scenario)
    assert "secret" in caplog.text


@played_by(served)
async def test_the_pages_and_their_files_are_served_under_a_strict_policy(asked: Asked) -> None:
    """Each file has its type, the policy and a tag; with that tag nothing is sent again. Another name is 404."""
    for path, kind in (("/", "text/html"), ("/swarm", "text/html"), ("/static/words.js", "text/javascript")):
        response = await asked("GET", path)
        assert response.status == 200
        assert response.headers["content-type"].startswith(kind)
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'; script-src 'self'" in response.headers["content-security-policy"]
        packed = await asked("GET", path, {"Accept-Encoding": "br, gzip"})
        assert packed.headers["content-encoding"] == "gzip"
        assert gzip.decompress(packed.body) == response.body
        assert len(packed.body) < len(response.body)
        again = await asked("GET", path, {"If-None-Match": response.headers["etag"]})
        assert (again.status, again.body) == (304, b"")
    for path in ("/static/nothing.js", "/static/..%2fpages.py", "/static/package.json", "/static/"):
        assert (await asked("GET", path)).status == 404


@played_by(served)
async def test_the_history_has_a_row_at_once(asked: Asked) -> None:
    """/history has a time and a value per column; a loss that is not a number is null."""
    history = (await asked("GET", "/history")).json
    assert len(history["times"]) >= 1
    assert {len(values) for values in history["series"].values()} == {len(history["times"])}
    assert history["series"]["loss"][0] is None
    packed = await asked("GET", "/history", {"Accept-Encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    assert json.loads(gzip.decompress(packed.body)).keys() == history.keys()
    assert abs(history["times"][0] - time.time()) < 60


def test_an_address_that_cannot_be_had_is_one_sentence_and_a_hint() -> None:
    """A port in use has exit code 6 and how to choose another; so has an address of another machine."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        server = StatusServer(None, StatusSettings(port=port), TOKEN, SystemClock())

        with pytest.raises(UserError) as caught:
            asyncio.run(server.start())

    assert caught.value.exit_code == ExitCode.CANNOT_BIND
    assert f"127.0.0.1:{port}: the port is in use" in caught.value.message
    assert "--status-port" in caught.value.hint
    elsewhere = StatusServer(None, StatusSettings(host="192.0.2.1", port=1), TOKEN, SystemClock())
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1:1") as caught:
        asyncio.run(elsewhere.start())
    assert "check status.host" in caught.value.hint


@played_by(served)
async def test_the_client_reads_what_the_server_says(asked: Asked, *, tmp_path: Path) -> None:
    """The thin client gets the same answers, and the node's own words where it refuses."""
    token = tmp_path / "status.token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    client = NodeClient(asked.address, token_file=str(token))
    assert (await asyncio.to_thread(client.status))["state"] == "training"
    assert len(await asyncio.to_thread(client.peers)) == 1
    assert len(await asyncio.to_thread(client.steps, 2)) == 2
    assert (await asyncio.to_thread(client.events))["last"] == 0
    await asyncio.to_thread(client.post, "/pause")
    assert asked.source.requests == ["pause"]
    with pytest.raises(UserError, match="there is no /dance"):
        await asyncio.to_thread(client.post, "/dance")


def test_the_client_ignores_proxies_and_tells_foreigners_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy in the environment is not asked; something that is no p2pnode is called so; silence is exit code 9."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")

    async def scenario(asked: Asked) -> None:
        assert (await asyncio.to_thread(NodeClient(asked.address).status))["schema"] == 1

    served(scenario)

    async def foreigner() -> None:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(NotReachable, match="is not a p2pnode"):
                await asyncio.to_thread(NodeClient(f"127.0.0.1:{port}").status)
        with pytest.raises(NotReachable, match="Connection refused") as caught:
            await asyncio.to_thread(NodeClient(f"127.0.0.1:{port}").status)
        assert caught.value.exit_code == ExitCode.NOT_REACHABLE
        assert "p2pnode start" in caught.value.hint

    asyncio.run(foreigner())


@played_by(served, "unready", host="0.0.0.0")
async def test_beyond_the_loopback_the_token_opens_everything_and_nothing_opens_without(
    asked: Asked, *, tmp_path: Path
) -> None:
    """Bound to all addresses, only the health checks answer an unauthenticated client, /readyz without its reason. A
    client with the token's file gets all; one without is told how to get it."""
    token = tmp_path / "status.token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    for path in ("/", "/swarm", "/static/words.js"):
        assert (await asked("GET", path)).status == 200
    assert (await asked("GET", "/stream")).status == 401
    for path in ("/status", "/peers", "/steps", "/history", "/events", "/metrics", "/openapi.json", "/nothing"):
        assert (await asked("GET", path)).status == 401
        assert (await asked("GET", path, POST)).status in (200, 404)
    assert (await asked("GET", "/healthz")).json["alive"] is True
    ready = await asked("GET", "/readyz")
    assert (ready.status, ready.json["reason"]) == (503, "")
    assert (await asked("GET", "/readyz", POST)).json["reason"]
    port = asked.address.rpartition(":")[2]
    address = f"0.0.0.0:{port}"
    assert (await asyncio.to_thread(NodeClient(address, token_file=str(token)).status))["schema"] == 1
    with pytest.raises(UserError, match="needs a token") as caught:
        await asyncio.to_thread(NodeClient(address).status)
    assert "--token-file" in caught.value.hint


@played_by(served)
async def test_connections_are_bounded(asked: Asked, *, monkeypatch: pytest.MonkeyPatch) -> None:
    """One too many is closed unheard; the others are kept, and one of them that ends makes room."""
    monkeypatch.setattr(status_server, "MAX_CONNECTIONS", 5)
    host, _, port = asked.address.partition(":")
    idle = [await asyncio.open_connection(host, int(port)) for _ in range(6)]
    readers = [asyncio.ensure_future(reader.read(1)) for reader, _ in idle]
    await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
    assert [reader.result() for reader in readers if reader.done()] == [b""]
    for reader in readers:
        reader.cancel()
    for _, writer in idle:
        writer.close()
    while len(asked.server._runner.server.connections) > 4:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert (await asked("GET", "/status")).status == 200
