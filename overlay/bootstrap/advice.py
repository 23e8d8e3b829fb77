"""What to do about an address through which a node cannot join, by the reason that was found. Pure."""

from __future__ import annotations

from collections.abc import Mapping

#: Addresses in one reminder; remembered peers may be many.
MAX_EXPLAINED = 8
_SILENT = "see that the machine is up, and that its firewall and router let TCP and UDP to that port through"
#: Parts of reasons (`hello`, `dialer`, `overlay.sockets`), each with the next step. The first match counts.
_ADVICE: tuple[tuple[str, str], ...] = (
    (
        "same swarm key and run",
        "compare the fingerprints: `p2pnode key show` here, and on the machine at that address; a new invitation has "
        "key, run and address",
    ),
    (
        "certificate of this swarm",
        "this node has the key or the run of another swarm: start it with a new invitation of the right one",
    ),
    ("belongs to run", "set --run to the run of that swarm, or give the address of a member of yours"),
    (
        "belongs to another swarm",
        "this state directory belongs to another swarm of the same name: name another one with --state-dir, or empty "
        "it with `p2pnode forget`",
    ),
    (
        "does not use TLS",
        "that swarm has no key, and this node has one: take the address of a member of yours, and its node.port",
    ),
    ("certificate of a node", "install the same version of p2pnode on both machines"),
    ("protocol version", "install the same version of p2pnode on both machines"),
    ("not as a p2pnode", "another program listens there: check the port, which is node.port of the other node"),
    ("without proof", "something between the machines answers for that node: give its own address and port"),
    ("own identity", "this state directory was copied: remove identity.key and incarnation from the copy"),
    ("this node itself", "give the address of another member"),
    ("has not joined", "that node still joins itself; this one dials again"),
    ("IPv6", 'set node.host = "::" on this node'),
    ("IPv4", 'set node.host = "::" on this node'),
    ("not on the loopback", 'set node.host = "0.0.0.0" on this node'),
    ("cannot be resolved", "check the name, and the DNS of this machine"),
    ("refused", "nothing listens there: see that the node runs, and that its node.port is the one given"),
    ("did not answer", _SILENT),
    ("was silent", _SILENT),
    ("cannot be reached", "no way leads there: check this machine's network, and the address"),
    ("broke", "see the log of the node at that address; one that runs with a key breaks off with one that has none"),
)
OTHERWISE = "check that it runs and the address is right"


def what_to_do(reason: str) -> str:
    """The next step for a person who reads why a bootstrap failed."""
    lower = reason.lower()
    return next((advice for part, advice in _ADVICE if part.lower() in lower), OTHERWISE)


def explained(attempts: Mapping[str, str]) -> list[str]:
    """One sentence per address: why it failed, and what to do."""
    return [f"{address} {reason}: {what_to_do(reason)}" for address, reason in list(attempts.items())[:MAX_EXPLAINED]]
