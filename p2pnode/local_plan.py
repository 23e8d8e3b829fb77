"""Several nodes on one machine: their numbers, ports and threads. Pure.

`p2pnode.local_run` starts them. Node N has the directory `local/N` below the state directory of its run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

#: Settings that each node has of its own, so that another one does not take them over.
OWN = frozenset(
    {
        "node.state_dir",
        "node.port",
        "node.advertise",
        "node.role",
        "status.port",
        "status.token_file",
        "swarm.bootstrap",
        "swarm.key_file",
        "swarm.run",
        "training.threads",
    }
)


class PlannedNode(NamedTuple):
    """One node to start. A port of 0 takes a free one; `threads` are those of its trainer. An empty `role` is that of
    the settings."""

    number: int
    port: int
    status_port: int
    threads: int
    role: str = ""


def plan(count: int, running: Collection[int], cores: int, *, port: int = 0, status_port: int = 0) -> list[PlannedNode]:
    """`count` nodes beside those with the numbers `running`: the lowest free numbers, and an equal share of the cores.

    With a port, node N takes the N-th from it on. Raises `ValueError` if that leaves the range of ports.
    """
    threads = max(1, cores // (len(running) + count))
    numbers = [number for number in range(1, len(running) + count + 1) if number not in running][:count]
    nodes = [
        PlannedNode(number, port and port + number - 1, status_port and status_port + number - 1, threads)
        for number in numbers
    ]
    for node in nodes:
        for chosen in (node.port, node.status_port):
            if chosen > 65535:
                raise ValueError(f"node {node.number} would need port {chosen}, and the last one is 65535")
    listening = {node.port for node in nodes if node.port}
    if both := sorted(listening & {node.status_port for node in nodes if node.status_port}):
        raise ValueError(f"port {both[0]} would be used twice, for a node and for the API of another")
    return nodes


def with_servers(nodes: Sequence[PlannedNode], servers: int) -> list[PlannedNode]:
    """The nodes in the order of their start: the first `servers` are servers of a parameter server, the others its
    workers. A server comes first because a worker founds no swarm. Raises `ValueError` for more servers than nodes."""
    if servers > len(nodes):
        raise ValueError(f"{servers} servers are more than the {len(nodes)} nodes of --local")
    if not servers:
        return list(nodes)
    return [node._replace(role="server" if place < servers else "peer") for place, node in enumerate(nodes)]


def inherited(settings: Mapping[str, Any], chosen: Collection[str]) -> dict[str, Any]:
    """What a new node takes over from a node that is here already, unless it was chosen for this start."""
    return {key: value for key, value in settings.items() if key not in OWN and key not in chosen}


def with_count(arguments: list[str], takes_value: Collection[str], *, stops_at_program: bool) -> list[str]:
    """The arguments with `--local 1` for a `--local` without a number.

    `takes_value`: the options whose next argument is their value. `stops_at_program`: what follows the first argument
    that is no option belongs to another program.
    """
    found = []
    at = 0
    while at < len(arguments):
        argument = arguments[at]
        if argument == "--" or (stops_at_program and not argument.startswith("-")):
            break
        found.append(argument)
        at += 1
        if argument == "--local" and not (at < len(arguments) and arguments[at].lstrip("-").isdigit()):
            found.append("1")
        elif argument in takes_value or argument == "--local":
            found += arguments[at : at + 1]
            at += 1
    return found + arguments[at:]
