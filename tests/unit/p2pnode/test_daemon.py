"""The daemon's own parts: the choice of a router."""

from __future__ import annotations

from p2pnode.config.settings import Config
from p2pnode.daemon import _gateway
from p2pnode.overlay.settings import NodeSettings
from tests.harness.environment.simulated import SeededEntropy


def test_the_router_is_asked_only_on_request() -> None:
    """`node.nat = "off"` has no gateway."""
    entropy = SeededEntropy(1)

    assert _gateway(Config(), entropy) is None
    assert _gateway(Config(node=NodeSettings(nat="auto", host="0.0.0.0")), entropy) is not None
