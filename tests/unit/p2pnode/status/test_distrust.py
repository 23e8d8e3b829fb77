"""Members that are left out, as the status shows them, and the command that trusts them again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from p2pnode.status.distrust import distrusted_members, trust_again

FIRST, SECOND = b"\xab" * 20, b"\xac" * 20


class Exchange:
    """Leaves these members out since second 10."""

    def __init__(self, *nodes: bytes) -> None:
        self.left_out = list(nodes)
        self.view = SimpleNamespace(trust=self)

    def distrusted(self) -> list[Any]:
        return [SimpleNamespace(node=node, reason="value", lies=3, since_s=10.0) for node in self.left_out]

    def forgive(self, node: bytes) -> None:
        self.left_out.remove(node)


def test_each_has_its_reason_and_for_how_long() -> None:
    """Never a negative time; without an exchange there are none."""
    exchange: Any = Exchange(FIRST)
    (found,) = distrusted_members(exchange, 12.34)
    assert (found.id, found.reason, found.lies, found.seconds) == (FIRST.hex(), "value", 3, 2.3)
    assert distrusted_members(exchange, 9.0)[0].seconds == 0.0
    assert distrusted_members(None, 9.0) == []


def test_those_whose_id_begins_so_are_trusted_again() -> None:
    """One, all that fit, or none; the answer says whether there was one."""
    exchange: Any = Exchange(FIRST, SECOND)
    assert not trust_again(exchange, "ff")
    assert trust_again(exchange, "ab")
    assert exchange.left_out == [SECOND]
    assert not trust_again(exchange, "ab")
    exchange = Exchange(FIRST, SECOND)
    assert trust_again(exchange, "a")
    assert exchange.left_out == []
    assert not trust_again(None, "a")
