"""The transport of a node of a closed swarm, and the watch on its key file.

When the key file changes, the node takes over the new keys without a restart: new certificates are made off the loop,
then datagrams, tickets and streams change at once. If the file cannot be used, the former keys stay and a warning is
logged once.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from p2pnode.config.settings import Config
from p2pnode.errors import ExitCode, UserError
from p2pnode.keys.invitation_files import IN_ENVIRONMENT, STANDARD_INPUT
from p2pnode.keys.key_files import read_key_file
from p2pnode.overlay.environment import Environment
from p2pnode.overlay.identity import Identity
from p2pnode.overlay.sealing.handshake import CLOCK_BOUND_S
from p2pnode.overlay.sealing.sealed_transport import SealedTransport
from p2pnode.overlay.sealing.swarm_key import KeyRing
from p2pnode.overlay.sealing.tickets import TicketVerifier
from p2pnode.overlay.sealing.tls import CertificateError, Credentials, make_certificates
from p2pnode.overlay.sockets.connection_pool import StreamSeal
from p2pnode.overlay.sockets.transport import SocketTransport

#: Between two checks of the key file.
POLL_INTERVAL_S = 2.0
#: Shortest time between two warnings about clocks.
CLOCK_WARNING_INTERVAL_S = 600.0


class ClosedSwarm:
    """`transport` is the node's transport; `watch` follows the key file."""

    def __init__(
        self,
        config: Config,
        identity: Identity,
        keys: KeyRing,
        credentials: Credentials,
        folder: Path,
        environment: Environment,
    ) -> None:
        self.keys = keys
        self._config = config
        source = config.swarm.key_file
        self._key_file = None if source in (STANDARD_INPUT, IN_ENVIRONMENT) else Path(source).expanduser()
        self._identity = identity
        self._folder = folder
        self._executor = environment.executor
        self._clock = clock = environment.clock
        self._log = log = environment.log
        self._clock_warned = float("-inf")
        self._tickets = TicketVerifier(
            keys,
            config.swarm.run,
            identity.node_id,
            environment.entropy.token,
            started_wall=clock.wall(),
            clock_differs=self._warn,
        )
        seal = StreamSeal(self._tickets, credentials)
        self._sockets = SocketTransport(config.node.host, config.node.port, log=log, clock=clock, seal=seal)
        self.transport = SealedTransport(
            self._sockets, identity, keys, config.swarm.run, clock=clock, entropy=environment.entropy, log=log
        )

    async def watch(self) -> None:
        """Use the keys of the key file whenever it changes, until cancelled."""
        path = self._key_file
        if path is None:
            return
        refused = ""
        run = self._executor.run  # the file may lie on a network disk that does not answer
        seen = await run(_file_signature, path)
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            now = await run(_file_signature, path)
            if now == seen:
                continue
            try:
                keys = await run(read_key_file, path)
                if keys != self.keys:
                    await self._change(keys)
            except Exception as error:
                reason = str(error) if isinstance(error, UserError | CertificateError) else repr(error)
                if reason != refused:
                    refused = reason
                    self._log.warning("swarm_key_not_changed", reason=refused, still=self.keys.fingerprints)
                if not isinstance(error, UserError):
                    continue  # the file is valid: try again
            seen = now

    async def _change(self, keys: KeyRing) -> None:
        credentials = await self._executor.run(
            make_credentials, self._identity, keys, self._config.swarm.run, self._clock.wall(), self._folder
        )
        before, self.keys = self.keys, keys
        # Without an `await` in between, so that all three use the same keys at any time.
        self.transport.use(keys)
        self._tickets.use(keys)
        self._sockets.use(credentials, end_others=not set(before) <= set(keys))
        self._log.info(
            "swarm_keys_changed", used=keys.fingerprints[0], accepted=keys.fingerprints, before=before.fingerprints
        )

    def _warn(self, ahead_s: float) -> None:
        now = self._clock.monotonic()
        if now - self._clock_warned > CLOCK_WARNING_INTERVAL_S:
            self._clock_warned = now
            self._log.warning(
                "clock_differs",
                ahead_s=round(ahead_s, 1),
                bound_s=CLOCK_BOUND_S,
                reason="a member's connections get no answer until both clocks agree; or it is a replayed recording",
            )


def _file_signature(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def make_credentials(identity: Identity, keys: KeyRing, run: str, wall_s: float, folder: Path) -> Credentials:
    """TLS contexts. Blocks for a fraction of a second: call it off the loop. Raises `CertificateError`."""
    return Credentials.of(make_certificates(identity, keys, run, wall_s), folder)


async def open_closed_swarm(
    config: Config, identity: Identity, keys: KeyRing, folder: Path, environment: Environment
) -> ClosedSwarm:
    """Make the certificates of a node with these keys, off the loop. Raises `UserError`."""
    wall_s = environment.clock.wall()
    try:
        credentials = await environment.executor.run(make_credentials, identity, keys, config.swarm.run, wall_s, folder)
    except (CertificateError, OSError) as error:
        raise UserError(
            f"this node's certificate could not be made: {error}",
            "check the installation of `cryptography`, and the state directory",
            ExitCode.UNEXPECTED,
        ) from error
    return ClosedSwarm(config, identity, keys, credentials, folder, environment)
