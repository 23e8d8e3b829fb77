"""The settings of the overlay: sections `[node]` and `[swarm]` of `node.toml`.

Defaults, ranges and one-line explanations are defined only here; `node.toml` and `docs/config.md` are generated from
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=0, le=65535)]


class NodeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """This machine's addresses and files."""

    state_dir: Annotated[
        str,
        Meta(
            description="Folder for identity, peers, checkpoints and remembered settings, of one run and one model; "
            "empty: ~/.local/state/p2pnode/<run>."
        ),
    ] = ""
    role: Annotated[
        Literal["peer", "server", "master", "peer+master"],
        Meta(
            description='"peer" trains and may own shards; "server" owns the values of a parameter server, and is a '
            '"peer" in other runs; "master" only serves the queue of records ([dispatch]), "peer+master" does both.',
        ),
    ] = "peer"
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
        Meta(description="Address that other nodes dial, if it is not the one they see; empty: the one they see."),
    ] = ""
    client_only: Annotated[
        bool,
        Meta(description="True if no other node can connect to this one: it trains, but never owns a shard."),
    ] = False
    nat: Annotated[
        Literal["off", "auto"],
        Meta(
            description='"auto" asks the router by UPnP to forward the port until this node leaves; needs '
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
            description='File with the swarm key, readable only by you ("-": standard input); empty: the key that '
            "--invite or `p2pnode key` put into the state directory; without one the swarm is open.",
        ),
    ] = ""
    allow_open: Annotated[
        bool,
        Meta(description="True allows an open swarm beyond the loopback: anyone who reaches the port can join."),
    ] = False
    discover: Annotated[
        Literal["off", "lan"],
        Meta(
            description='"lan" announces run and address in the local network and joins nodes of the same run that it '
            'finds there (multicast DNS); needs `pip install "p2pnode[lan]"`.',
        ),
    ] = "off"


@dataclass(frozen=True)
class OverlaySettings:
    """All settings of one overlay. `k` and `alpha` are Kademlia's constants, as in its paper; no file sets them.
    `version`: of the program, which peers show."""

    node: NodeSettings
    swarm: SwarmSettings
    k: int = 20
    alpha: int = 3
    version: str = ""
