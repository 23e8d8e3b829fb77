"""The package's server without storage."""

from __future__ import annotations

import asyncio

import pytest

from p2pnode.overlay.identity import identity_from_seed
from p2pnode.overlay.kademlia.server import SwarmServer
from p2pnode.overlay.settings import LivenessSettings, NodeSettings, OverlaySettings, SwarmSettings
from tests.harness.environment.simulated import make_environment
from tests.harness.environment.virtual_loop import VirtualLoop

IDENTITY = identity_from_seed(b"r" * 32)


def server() -> SwarmServer:
    settings = OverlaySettings(
        node=NodeSettings(host="10.0.0.1"), swarm=SwarmSettings(run="tests"), liveness=LivenessSettings()
    )
    return SwarmServer(IDENTITY, settings, make_environment())


def test_the_server_has_the_id_of_the_identity_and_stores_nothing() -> None:
    """Values cannot be kept, and the package's own entry points raise."""

    async def story() -> None:
        made = server()
        assert made.node.id == made.protocol.own_id == IDENTITY.node_id
        with pytest.raises(TypeError):
            made.storage[b"k"] = b"v"  # type: ignore[index]
        for entry in (made.get, made.set, made.listen, made.bootstrap):
            with pytest.raises(NotImplementedError, match="stores no values"):
                await entry(b"k")

    VirtualLoop().run(story())


def test_an_unknown_attribute_of_the_protocol_is_no_remote_call() -> None:
    """The package would send a datagram for `protocol.anything`."""

    async def story() -> None:
        await asyncio.sleep(0)
        with pytest.raises(AttributeError, match="anything"):
            server().protocol.anything  # noqa: B018

    VirtualLoop().run(story())
