"""Who may ask what of the HTTP API: the decision alone, without a server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2pnode.status.guard import Guard, Refusal, RequestFacts

TOKEN = "correct-horse-battery"
READ = RequestFacts(
    method="GET",
    path="/status",
    host="127.0.0.1:8080",
    origin=None,
    authorization=None,
    has_change_header=False,
    has_body=False,
    body_bytes=None,
)
CHANGE = replace(READ, method="POST", path="/pause", has_change_header=True, authorization=f"Bearer {TOKEN}")
OUTSIDE = replace(READ, host="192.0.2.1:8080", authorization=f"Bearer {TOKEN}")


def loopback() -> Guard:
    return Guard(token=TOKEN, on_loopback=True)


def outside(*names: str) -> Guard:
    return Guard(token=TOKEN, on_loopback=False, names=names)


def status(refusal: Refusal | None) -> int:
    return 200 if refusal is None else refusal.status


def test_reading_on_the_loopback_needs_nothing() -> None:
    """GET and HEAD pass without token and header."""
    assert loopback().check(READ) is None
    assert loopback().check(replace(READ, method="HEAD")) is None


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "FROB"])
def test_everything_but_reading_needs_header_and_token(method: str) -> None:
    """Any other method, known or not, is a change."""
    request = replace(CHANGE, method=method)

    assert loopback().check(request) is None
    assert status(loopback().check(replace(request, has_change_header=False))) == 403
    assert status(loopback().check(replace(request, authorization=None))) == 401


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN.upper()}",
        "Bearer \udcff",
        "Bearer " + "x" * 100_000,
    ],
)
def test_a_wrong_token_is_401_with_a_challenge_and_no_secret(authorization: str) -> None:
    """No text that is not the token passes; the refusal explains how to send it, and never contains it."""
    refusal = loopback().check(replace(CHANGE, authorization=authorization))

    assert refusal is not None
    assert (refusal.status, refusal.challenge) == (401, True)
    assert TOKEN not in refusal.error + refusal.hint
    assert "Authorization: Bearer" in refusal.hint


def test_the_scheme_may_be_written_as_http_allows() -> None:
    """`bearer` in any case, and spaces around the token, are the same."""
    assert loopback().check(replace(CHANGE, authorization=f"bEARER   {TOKEN} ")) is None


def test_beyond_the_loopback_everything_needs_the_token_but_the_health_checks() -> None:
    """Reads too; a supervisor's probes do not, and are not trusted with reasons. The files of the dashboard contain
    nothing about the node."""
    guard = outside()

    assert guard.check(OUTSIDE) is None
    for path in ("/", "/swarm", "/static/words.js"):
        assert guard.check(replace(OUTSIDE, authorization=None, path=path)) is None
        assert (
            status(guard.check(replace(OUTSIDE, authorization=None, path=path, method="POST", has_change_header=True)))
            == 401
        )
        assert status(guard.check(replace(OUTSIDE, path=path, host="evil.example"))) == 403
    for path in ("/status", "/stream", "/history", "/static", "/swarm/", "/metrics", "/openapi.json", "/nothing"):
        assert status(guard.check(replace(OUTSIDE, authorization=None, path=path))) == 401
    for path in ("/healthz", "/readyz"):
        probe = replace(OUTSIDE, authorization=None, path=path)
        assert guard.check(probe) is None
        assert not guard.is_authenticated(probe)
    assert guard.is_authenticated(OUTSIDE)


def test_a_connection_from_this_machine_to_an_outside_address_needs_the_token() -> None:
    """A proxy on the same machine forwards unauthenticated clients: the source address proves nothing."""
    assert status(outside().check(replace(OUTSIDE, host="127.0.0.1", authorization=None))) == 401


FOREIGN = ["evil.example", "127.0.0.1.evil.example", "10.0.0.5", "", "[::1", "localhost.evil", "[::1]x", "a:b"]


@pytest.mark.parametrize("host", FOREIGN)
def test_on_the_loopback_only_its_names_are_answered(host: str) -> None:
    """A name that was made to point here gets nothing, with a token or without."""
    assert status(loopback().check(replace(READ, host=host))) == 403
    assert status(loopback().check(replace(CHANGE, host=host))) == 403


@pytest.mark.parametrize(
    ("host", "names", "expected"),
    [
        ("192.0.2.1:8080", (), 200),
        ("[2001:db8::1]:8080", (), 200),
        ("localhost", (), 200),
        ("node-1:8080", (), 403),
        ("node-1:8080", ("node-1",), 200),
        ("NODE-1", ("node-1",), 200),
        ("node-1.evil.example", ("node-1",), 403),
    ],
)
def test_outside_addresses_and_listed_names_are_answered(host: str, names: tuple[str, ...], expected: int) -> None:
    """An address cannot be rebound, a name can: those in status.names count as the node's own."""
    assert status(outside(*names).check(replace(OUTSIDE, host=host))) == expected


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("http://127.0.0.1:8080", 200),
        ("http://127.0.0.1:8081", 403),
        ("https://127.0.0.1:8080", 403),
        ("http://evil.example", 403),
        ("null", 403),
        ("", 403),
    ],
)
def test_pages_of_others_may_neither_steer_nor_read(origin: str, expected: int) -> None:
    """Any Origin but the node's own is refused, for reads as well: no page can hold its connections open."""
    assert status(loopback().check(replace(READ, origin=origin))) == expected
    assert status(loopback().check(replace(CHANGE, origin=origin))) == expected


def test_behind_a_proxy_with_tls_its_own_page_counts() -> None:
    """A listed name may be the origin over https."""
    request = replace(OUTSIDE, host="node.example", origin="https://node.example")

    assert outside("node.example").check(request) is None
    assert status(outside("node.example").check(replace(request, origin="https://other.example"))) == 403


@pytest.mark.parametrize(
    ("has_body", "body_bytes", "expected"),
    [(True, 4096, 200), (True, 4097, 413), (True, None, 411), (False, 0, 200), (False, None, 200)],
)
def test_bodies_are_bounded_and_announced(has_body: bool, body_bytes: int | None, expected: int) -> None:
    """A body of unknown length could be of any: it is refused, as is one that is too long."""
    request = replace(CHANGE, has_body=has_body, body_bytes=body_bytes)

    assert status(loopback().check(request)) == expected
