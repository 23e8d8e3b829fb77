"""Joins the swarm for a moment, under an identity of its own that owns nothing, and leaves again.

Each bootstrap is asked by itself, so each has its own result. Then the node's own port is opened. Members are asked to
connect to it, which shows whether others reach this machine. Two are pinged, which shows whether UDP arrives. It uses
the code of the daemon and no other. The members see a peer that comes and leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from p2pnode import __version__
from p2pnode.config.settings import Config
from p2pnode.doctor.machine import DoctorCheck, error, info, ok, warning
from p2pnode.keys.closed_swarm import open_closed_swarm
from p2pnode.overlay.addresses import Address, is_loopback
from p2pnode.overlay.bootstrap.dialer import (
    HELLO_TIMEOUT_S,
    RESOLVE_TIMEOUT_S,
    NotThisSwarm,
    resolve,
    what_to_do,
    why_unreachable,
)
from p2pnode.overlay.bootstrap.hello import HelloContext, HelloRejected, say_hello
from p2pnode.overlay.bootstrap.peer_store import PeerStore
from p2pnode.overlay.environment import Environment
from p2pnode.overlay.errors import OverlayError
from p2pnode.overlay.identity import load_identity
from p2pnode.overlay.overlay import Overlay
from p2pnode.overlay.sealing.swarm_key import KeyRing
from p2pnode.overlay.settings import OverlaySettings
from p2pnode.overlay.sockets.transport import SocketTransport
from p2pnode.overlay.system import FolderDisk, SystemClock, SystemEntropy, ThreadExecutor
from p2pnode.overlay.transport import PortInUse, Request, Response, Transport
from p2pnode.terminal.numbers import duration

#: Remembered peers that are asked besides the bootstraps.
MAX_REMEMBERED = 4
#: Longest wait for the way in, and then for members to connect back.
JOIN_S, DIAL_BACK_S = 8.0, 8.0
#: Members that are pinged.
PINGED = 2
POLL_S = 0.1


class AddressAnswer(NamedTuple):
    """What came of one address: how this machine looks from there, or why it did not answer."""

    address: str
    reason: str
    observed_host: str = ""


class _Log:
    """Keeps the names of warnings."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, Any]] = {}

    def debug(self, event: str, **fields: Any) -> None: ...

    def info(self, event: str, **fields: Any) -> None: ...

    def warning(self, event: str, **fields: Any) -> None:
        self.seen[event] = fields

    def error(self, event: str, **fields: Any) -> None:
        self.seen[event] = fields


class _Visitor:
    """What the visit uses: an environment whose files go with a temporary folder, and the keys of the swarm."""

    def __init__(self, config: Config, keys: KeyRing | None, folder: Path) -> None:
        self.config, self.keys, self.folder = config, keys, folder
        self.log = _Log()
        self.entropy = SystemEntropy()
        disk, self.executor = FolderDisk(folder), ThreadExecutor()
        self.environment = Environment(
            clock=SystemClock(), entropy=self.entropy, disk=disk, executor=self.executor, log=self.log
        )
        self.identity = load_identity(disk, self.entropy)
        self.boot_id = int.from_bytes(os.urandom(4), "big")

    async def transport(self, port: int) -> Transport:
        """A closed transport on this port of the node's host."""
        config = msgspec.structs.replace(self.config, node=msgspec.structs.replace(self.config.node, port=port))
        if self.keys is None:
            return SocketTransport(config.node.host, port, log=self.log, clock=self.environment.clock)
        sealed = await open_closed_swarm(config, self.identity, self.keys, self.folder, self.environment)
        return sealed.transport


async def visit(config: Config, keys: KeyRing | None) -> AsyncIterator[DoctorCheck]:
    """The findings, each as soon as it is known. `keys`: of a closed swarm. The node's port must be free."""
    with tempfile.TemporaryDirectory(prefix="p2pnode-doctor-") as folder:
        visitor = _Visitor(config, keys, Path(folder))
        try:
            remembered = _remembered(config.state_folder, visitor)
            places = list(dict.fromkeys([*config.swarm.bootstrap, *remembered]))
            if not places:
                what = "none is set and no peer is remembered: this node founds a swarm, or waits for others"
                do = "to have the way to a member looked at: p2pnode doctor --bootstrap HOST:PORT"
                yield info("bootstraps", what, do)
                return
            answers = await _ask_all(visitor, places)
            for answer in answers:
                is_bootstrap = answer.address in config.swarm.bootstrap
                yield _judged(answer, is_bootstrap=is_bootstrap, others=any(not one.reason for one in answers))
            if "clock_differs" in visitor.log.seen:
                yield _clock(visitor.log.seen["clock_differs"])
            for check in _nat(config, [one.observed_host for one in answers if one.observed_host]):
                yield check
            if any(not one.reason for one in answers):
                async for check in _join(visitor, [one.address for one in answers if not one.reason]):
                    yield check
        finally:
            visitor.executor.close()


def _remembered(state_folder: Path, visitor: _Visitor) -> list[str]:
    """Addresses of former peers."""
    store = PeerStore(replace(visitor.environment, disk=FolderDisk(state_folder)))
    store.load()
    return [str(address) for address in store.addresses()[:MAX_REMEMBERED]]


async def _ask_all(visitor: _Visitor, places: Sequence[str]) -> list[AddressAnswer]:
    transport = await visitor.transport(0)
    bound = await transport.open(lambda _data, _source: None, _refuse)
    try:
        asked = await asyncio.gather(*(_ask(visitor, transport, bound, place) for place in places))
    finally:
        await transport.close()
    return list(asked)


async def _refuse(_request: Request) -> Response:
    raise OverlayError("this is p2pnode doctor, which serves nothing")


async def _ask(visitor: _Visitor, transport: Transport, bound: Address, place: str) -> AddressAnswer:
    """The best answer of the addresses of one place."""
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):
            addresses = await resolve(place)
    except TimeoutError:
        return AddressAnswer(place, f"cannot be resolved: no answer within {RESOLVE_TIMEOUT_S:g} s")
    except (OSError, ValueError) as failure:
        return AddressAnswer(place, f"cannot be resolved: {getattr(failure, 'strerror', None) or failure}")
    context = HelloContext(visitor.identity, visitor.boot_id, visitor.config.swarm.run, visitor.entropy)
    reason = "has no address"
    for address in addresses:
        named = "" if str(address) == place else f"{address} "
        reason = named + why_unreachable(bound, address) if why_unreachable(bound, address) else ""
        if reason:
            continue
        try:
            result = await say_hello(transport, address, context=context, genesis=None, timeout_s=HELLO_TIMEOUT_S)
        except HelloRejected as failure:
            reason = named + failure.reason
        else:
            return AddressAnswer(place, "", result.observed_host)
    return AddressAnswer(place, reason)


def _judged(answer: AddressAnswer, *, is_bootstrap: bool, others: bool) -> DoctorCheck:
    """A bootstrap that does not answer keeps a node out only if no other one answers."""
    kind = "bootstrap" if is_bootstrap else "former peer"
    if not answer.reason:
        return ok(kind, f"{answer.address} answers, and belongs to this run")
    what, do = f"{answer.address} {answer.reason}", what_to_do(answer.reason)
    if not is_bootstrap:
        return info(kind, what, do)
    return (warning if others else error)(kind, what, do)


def _clock(fields: dict[str, Any]) -> DoctorCheck:
    ahead = float(fields.get("ahead_s", 0))
    what = f"the clock of a member is {duration(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} this one"
    return error("clock", what, "set both clocks (NTP)")


def _nat(config: Config, observed: Sequence[str]) -> list[DoctorCheck]:
    """Whether others see another address than those of this machine."""
    from p2pnode.keys.invitation_files import own_host

    seen = next((host for host in observed if not is_loopback(host)), "")
    if not seen:
        return []
    own = own_host()
    if not own or own == seen:
        return [ok("NAT", f"others see this machine at its own address {seen}")]
    port = config.node.port
    what = f"others see this machine at {seen}, and its own address is {own}: there is a NAT between"
    if config.node.nat == "auto" or config.node.client_only:
        return [info("NAT", what)]
    do = f'forward UDP and TCP {port} in the router, set node.nat = "auto", or node.client_only = true'
    return [info("NAT", what, do)]


async def _join(visitor: _Visitor, places: Sequence[str]) -> AsyncIterator[DoctorCheck]:
    """Join through those that answered, on the node's own port, see who reaches whom, and leave."""
    config = visitor.config
    overlay = Overlay(
        identity=visitor.identity,
        incarnation=1,
        boot_id=visitor.boot_id,
        settings=OverlaySettings(config.node, config.swarm, version=__version__),
        transport=await visitor.transport(config.node.port),
        environment=visitor.environment,
    )
    try:
        await overlay.start()
        async with asyncio.timeout(JOIN_S):
            await overlay.join(places, genesis=None)
        for check in await _pings(overlay):
            yield check
        yield await _reached(overlay, config)
        await overlay.leave()
    except (PortInUse, OSError, ValueError) as failure:
        yield error("port", str(failure), "end what holds it, or choose another port")
    except (NotThisSwarm, TimeoutError) as failure:
        yield error("join", f"no way into the swarm: {failure or 'it took too long'}", "see the bootstraps above")
    finally:
        await overlay.stop()


async def _pings(overlay: Overlay) -> list[DoctorCheck]:
    """Round trips of datagrams to members."""
    members = [peer.contact for peer in overlay.members()[:PINGED]]
    loop = asyncio.get_running_loop()
    answered: list[str] = []
    for member in members:
        began = loop.time()
        if await overlay.ping(member) is not None:
            answered.append(f"{duration(loop.time() - began)} to {member.address}")
    if answered:
        return [ok("UDP", f"a round trip of {', '.join(answered)}")]
    return [
        error(
            "UDP",
            "TCP reaches the swarm and no datagram comes back",
            f"let UDP to and from port {overlay.address.port} through the firewalls of both machines",
        )
    ]


async def _reached(overlay: Overlay, config: Config) -> DoctorCheck:
    """Whether members can connect to this node's port."""
    if config.node.client_only:
        return info("reachable", "node.client_only is set: it trains and owns no shards")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DIAL_BACK_S):
            while not overlay.report().reachable.reason:  # noqa: ASYNC110 - it is set by no event
                await asyncio.sleep(POLL_S)
    found, port = overlay.report().reachable, config.node.port
    if found.reached:
        return ok("reachable", f"members can connect to port {port} of this machine")
    do = (
        f'open UDP and TCP {port} in its firewall and router, or set node.nat = "auto"; it trains without it, and owns '
        "no shards"
    )
    return warning("reachable", f"no member can connect to port {port}: {found.reason or 'nobody has tried'}", do)
