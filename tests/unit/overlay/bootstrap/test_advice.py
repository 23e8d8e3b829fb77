"""What to do about an address through which a node cannot join."""

from __future__ import annotations

import re

import pytest

from p2pnode.overlay.bootstrap.dialer import MAX_EXPLAINED, OTHERWISE, explained, what_to_do
from p2pnode.overlay.sockets.connection_pool import CLOSED_WITHOUT_RESPONSE
from tests.harness.project.repository import ROOT

#: Modules that make reasons, and the calls that do.
MAKERS = {
    "overlay/bootstrap/hello.py": r"HelloRejected\(\s*f?\"([^\"]+)\"",
    "overlay/sockets/connection_pool.py": r"TransportError\(\"(?:foreign|refused|timeout|reset)\", to, f?\"([^\"]+)\"",
}


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (CLOSED_WITHOUT_RESPONSE, "p2pnode key show"),
        ("has no certificate of this swarm: it has another key or another run", "invitation"),
        ("presented no certificate of a node: its key is no Ed25519 key", "same version"),
        ("belongs to run 'digits', this node to 'mnist'", "--run"),
        ("belongs to another swarm named 'digits' (genesis ab, here cd)", "p2pnode forget"),
        ("refused the connection: no process listens there", "node.port"),
        ("did not answer for 2 s", "firewall"),
        ("cannot be resolved: [Errno -2] Name or service not known", "DNS"),
        ("is IPv6, and this node listens on IPv4 only", '"::"'),
        ("something new", OTHERWISE),
    ],
)
def test_each_cause_has_its_own_next_step(reason: str, words: str) -> None:
    """A wrong key, a wrong run and an unreachable address are told apart."""
    assert words in what_to_do(reason)


def test_every_reason_in_the_code_has_advice() -> None:
    """None of the reasons that `hello` and connecting give falls through to the general one."""
    found = [
        reason
        for path, pattern in MAKERS.items()
        for reason in re.findall(pattern, (ROOT / path).read_text(encoding="utf-8"))
    ]
    assert len(found) > 10
    # A peer that answers as somebody else is dialled again, and is no person's business.
    assert [reason for reason in found if what_to_do(reason) == OTHERWISE and "answers as" not in reason] == []


def test_a_reminder_names_some_addresses_with_cause_and_next_step() -> None:
    """Many remembered peers do not fill the log."""
    attempts = {f"10.0.0.{at}:1": "did not answer" for at in range(MAX_EXPLAINED + 5)}
    sentences = explained(attempts)
    assert len(sentences) == MAX_EXPLAINED
    assert sentences[0].startswith("10.0.0.0:1 did not answer: see that the machine is up")
