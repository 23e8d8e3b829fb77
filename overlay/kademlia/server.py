"""The server of the `kademlia` package, reduced to routing: this overlay stores no values."""

from __future__ import annotations

from types import MappingProxyType
from typing import NoReturn

from kademlia.network import Server

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.identity import Identity
from p2pnode.overlay.kademlia.calls import PROBE_TIMEOUT_S
from p2pnode.overlay.kademlia.protocol import IdentityProofs, SwarmProtocol
from p2pnode.overlay.settings import OverlaySettings
from p2pnode.overlay.transport import Transport


class SwarmServer(Server):  # type: ignore[misc]
    """The package's server without storage: its node and its protocol behind a `Transport`."""

    protocol_class = SwarmProtocol

    def __init__(
        self,
        identity: Identity,
        settings: OverlaySettings,
        environment: Environment,
    ) -> None:
        super().__init__(settings.k, settings.alpha, identity.node_id)
        # The package's storage keeps every value for a week.
        self.storage: MappingProxyType[bytes, object] = MappingProxyType({})
        self.protocol: SwarmProtocol = self.protocol_class(
            self.node,
            settings.k,
            proofs=IdentityProofs(identity),
            environment=environment,
            ceiling_s=PROBE_TIMEOUT_S,
        )

    def attach(self, transport: Transport) -> None:
        """Send through an open transport; replaces `listen` of the package."""
        self.protocol.connection_made(transport)

    def stop(self) -> None:
        self.protocol.close()

    async def _not_kept(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError(
            "this overlay stores no values, and its transport listens; see p2pnode.overlay.overlay"
        )

    listen = bootstrap = get = set = set_digest = _not_kept
