"""The members that a node leaves out (`training.exchange.trust`), for `/status` and for the command that undoes it."""

from __future__ import annotations

from p2pnode.status.schema import DistrustedMember
from training.exchange.exchange import Exchange


def distrusted_members(exchange: Exchange | None, now_s: float) -> list[DistrustedMember]:
    """Those that are left out now."""
    if exchange is None:
        return []
    return [
        DistrustedMember(
            id=one.node.hex(), reason=one.reason, lies=one.lies, seconds=round(max(0.0, now_s - one.since_s), 1)
        )
        for one in exchange.view.trust.distrusted()
    ]


def trust_again(exchange: Exchange | None, prefix: str) -> bool:
    """Trust the members again whose id, in hexadecimal, begins so; False if none of those left out does."""
    if exchange is None:
        return False
    found = [one.node for one in exchange.view.trust.distrusted() if one.node.hex().startswith(prefix)]
    for node in found:
        exchange.forgive(node)
    return bool(found)
