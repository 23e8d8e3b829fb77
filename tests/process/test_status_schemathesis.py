"""Schemathesis over the published description: generated requests against the real server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, seed, settings

from p2pnode.config.settings import Config, StatusSettings
from p2pnode.overlay.system import SystemClock
from p2pnode.status.openapi import description
from p2pnode.status.server import StatusServer
from tests.process.harness.fake_node import FakeSource
from tests.process.test_status_server import TOKEN

SEED = 20261121
#: Names of the description, without schemathesis: every process that collects tests would import it for a second.
OPERATIONS = {
    f"{method.upper()} {path}": operation
    for path, methods in description()["paths"].items()
    for method, operation in methods.items()
    if path != "/stream"  # it does not end: its messages have tests in test_status_server.py
}
#: What takes no parameter can be asked in one way only: there is nothing to get wrong.
KINDS = [
    (label, mode)
    for label, operation in sorted(OPERATIONS.items())
    for mode in ("positive", "negative")
    if mode == "positive" or operation.get("parameters")
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server over the fake source on a loop in another thread."""
    loop = asyncio.new_event_loop()
    server = StatusServer(FakeSource(Config(), "ignore"), StatusSettings(port=0), TOKEN, SystemClock())
    thread = threading.Thread(target=loop.run_forever, name="status-server")
    thread.start()
    try:
        yield f"http://{asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)}"
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@pytest.fixture(scope="module")
def operations() -> dict[str, Any]:
    """Each operation as schemathesis reads it."""
    import schemathesis

    found = [one.ok() for one in schemathesis.openapi.from_dict(description()).get_all_operations()]
    return {f"{one.method.upper()} {one.path}": one for one in found}


def test_schemathesis_reads_the_operations_that_are_tested(operations: dict[str, Any]) -> None:
    """All of them, and what it takes for parameters."""
    assert sorted(operations) == sorted([*OPERATIONS, "GET /stream"])
    with_parameters = [
        label for label, operation in operations.items() if label in OPERATIONS and list(operation.iter_parameters())
    ]
    assert sorted(with_parameters) == [label for label, mode in KINDS if mode == "negative"]


def test_the_node_publishes_what_is_tested_here(address: str) -> None:
    """`/openapi.json` is the description that the other tests go by."""
    published = requests.get(f"{address}/openapi.json", timeout=60)

    assert published.status_code == 200
    assert published.json() == json.loads(json.dumps(description()))


@pytest.mark.parametrize(("label", "mode"), KINDS)
@pytest.mark.parametrize("authorization", [f"Bearer {TOKEN}", None], ids=["token", "none"])
def test_no_request_finds_a_fault(
    address: str, operations: dict[str, Any], label: str, mode: str, authorization: str | None
) -> None:
    """Whatever is sent, the answer is one that the description knows, and never a server error."""
    from schemathesis import GenerationMode, checks

    every = [
        checks.not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_headers_conformance,
        checks.response_schema_conformance,
    ]
    operation = operations[label]
    session = requests.Session()
    headers = {} if authorization is None else {"Authorization": authorization}
    print(f"seed {SEED}")
    answered: list[int] = []

    @seed(SEED)
    @settings(
        max_examples=12,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    def requests_of_all_kinds(case: Any) -> None:
        if case.query and "timeout" in case.query:
            case.query["timeout"] = 0.01 if mode == "positive" else case.query["timeout"]
        response = case.call(base_url=address, session=session, headers=headers, timeout=30)
        answered.append(response.status_code)
        case.validate_response(response, checks=every)

    try:
        requests_of_all_kinds()
    finally:
        session.close()

    assert answered
