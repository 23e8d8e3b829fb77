"""Commands that query a running node or request a change of it: thin clients of its HTTP API."""

from __future__ import annotations

import json

from p2pnode.client import NodeClient
from p2pnode.commands.options import (
    AddressOption,
    ConfigOption,
    JsonOption,
    RunOption,
    StateDirOption,
    TokenFileOption,
    node_client,
)
from p2pnode.commands.output import print_line, print_lines
from p2pnode.terminal.peers_view import peers_lines
from p2pnode.terminal.status_view import status_lines


def status(
    address: AddressOption = None,
    state_dir: StateDirOption = None,
    run: RunOption = None,
    config: ConfigOption = None,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
) -> int:
    """Print whether this node is connected, whether it learns, what it waits for, and what to do.

    Example: p2pnode status --address 127.0.0.1:8080
    """
    answer = node_client(address, state_dir, config, token_file, run).status()
    if as_json:
        print_line(json.dumps(answer, indent=2))
    else:
        print_lines(lambda style: status_lines(answer, style))
    return 0


def peers(
    address: AddressOption = None,
    state_dir: StateDirOption = None,
    run: RunOption = None,
    config: ConfigOption = None,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
) -> int:
    """List the live peers of this node, one line each."""
    answer = node_client(address, state_dir, config, token_file, run).peers()
    if as_json:
        print_line(json.dumps({"schema": 1, "peers": answer}, indent=2))
    elif answer:
        print_lines(lambda style: peers_lines(answer, style))
    else:
        print_line("this node knows no peers")
    return 0


def leave(
    address: AddressOption = None,
    state_dir: StateDirOption = None,
    run: RunOption = None,
    config: ConfigOption = None,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
) -> int:
    """Ask a node to leave: it hands over its shards and ends with exit code 0."""
    return _request(
        node_client(address, state_dir, config, token_file, run),
        "/leave",
        "is leaving; `p2pnode status` shows when it has ended",
        as_json=as_json,
    )


def pause(
    address: AddressOption = None,
    state_dir: StateDirOption = None,
    run: RunOption = None,
    config: ConfigOption = None,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
) -> int:
    """Ask a node to pause training after its current step; it continues to own its shards."""
    client = node_client(address, state_dir, config, token_file, run)
    return _request(client, "/pause", "pauses after its current step", as_json=as_json)


def resume(
    address: AddressOption = None,
    state_dir: StateDirOption = None,
    run: RunOption = None,
    config: ConfigOption = None,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
) -> int:
    """Ask a paused node to train again."""
    client = node_client(address, state_dir, config, token_file, run)
    return _request(client, "/resume", "trains again", as_json=as_json)


def _request(client: NodeClient, path: str, outcome: str, *, as_json: bool) -> int:
    client.post(path)
    if as_json:
        accepted = path.removeprefix("/")
        print_line(json.dumps({"schema": 1, "address": client.address, "accepted": accepted}))
    else:
        print_line(f"the node at {client.address} {outcome}")
    return 0
