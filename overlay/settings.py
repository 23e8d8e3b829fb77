"""The settings of the overlay: sections `[node]` and `[swarm]` of `node.toml`.

Defaults, ranges and the one-line explanations live here and nowhere else; `node.toml` and `docs/config.md` are
generated from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=0, le=65535)]
PositiveFloat = Annotated[float, Meta(gt=0)]


class NodeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """This machine's place in the network."""

    state_dir: Annotated[
        str,
        Meta(description="Folder for the identity key, remembered peers and checkpoints; made on first start."),
    ] = "~/.local/state/p2pnode"
    host: Annotated[
        str,
        Meta(description='Address to listen on, UDP and TCP; "0.0.0.0" or "::" for every interface.'),
    ] = "127.0.0.1"
    port: Annotated[
        Port,
        Meta(description="Port for the overlay (UDP) and the exchange (TCP); 0 takes a free one."),
    ] = 8468
    advertise: Annotated[
        str,
        Meta(description="Address other nodes should dial, when it is not the one they see; empty: the one they see."),
    ] = ""
    client_only: Annotated[
        bool,
        Meta(description="True where nobody can connect to this node: it trains, but never owns a shard."),
    ] = False
    nat: Annotated[
        Literal["off", "auto"],
        Meta(
            description='"auto" asks the router by UPnP to forward the port, and gives it back on leaving; needs '
            '`pip install "p2pnode[nat]"`.',
        ),
    ] = "off"


class SwarmSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which swarm, and how to find it."""

    run: Annotated[
        str,
        Meta(min_length=1, max_length=64, description="Name of the run; all nodes of a swarm share it."),
    ] = "default"
    bootstrap: Annotated[
        list[str],
        Meta(
            max_length=64,
            description='Peers to join through, as ["host:port"]; empty on a node that founds the swarm.',
        ),
    ] = []
    key_file: Annotated[
        str,
        Meta(
            max_length=4096,
            description='File with the swarm key, readable by you alone ("-": standard input); empty: the one that '
            "--invite or `p2pnode key` put into the state directory, or else an open swarm.",
        ),
    ] = ""
    allow_open: Annotated[
        bool,
        Meta(description="True listens beyond the loopback without a swarm key: whoever reaches the port can join."),
    ] = False
    discover: Annotated[
        Literal["off", "lan"],
        Meta(
            description='"lan" announces run and address in the local network and joins whom it finds there of this '
            'run (multicast DNS); needs `pip install "p2pnode[lan]"`.',
        ),
    ] = "off"
    ids_per_address: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="Most nodes taken in from one address while the swarm is open (one IPv6 /64 counts as one; the "
            "loopback is free); raise it where more share one behind a NAT, 0: any number.",
        ),
    ] = 8


class LivenessSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How fast a silent peer is found out (SWIM with Lifeguard's local health)."""

    probe_interval_s: Annotated[
        PositiveFloat,
        Meta(description="Seconds between liveness probes; partners of owned shards are probed in every round."),
    ] = 1.0
    probe_timeout_s: Annotated[
        PositiveFloat,
        Meta(description="Longest wait for a direct probe; the measured round trip makes it shorter."),
    ] = 0.5
    indirect_probes: Annotated[
        int,
        Meta(ge=0, le=10, description="Peers asked to probe a silent one before it is suspected."),
    ] = 3
    suspicion_s: Annotated[
        PositiveFloat,
        Meta(description="Seconds a suspected peer has to refute before it counts as dead."),
    ] = 3.0


@dataclass(frozen=True)
class OverlaySettings:
    """All settings of one overlay. `k` and `alpha` are Kademlia's constants, as in its paper; no file sets them."""

    node: NodeSettings
    swarm: SwarmSettings
    liveness: LivenessSettings
    k: int = 20
    alpha: int = 3
