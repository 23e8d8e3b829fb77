"""Commands that query a running node or request a change of it: thin clients of its HTTP API."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, NoReturn
from urllib.parse import urlencode

import typer

from p2pnode import tables
from p2pnode.client import NodeClient, NotReachable
from p2pnode.commands.options import (
    AddressOption,
    ConfigOption,
    JsonOption,
    RunOption,
    StateDirOption,
    TokenFileOption,
    node_client,
)
from p2pnode.commands.output import print_line

#: Seconds between two requests of `watch`.
WATCH_INTERVAL_S = 1.0
#: Most peers that `watch` shows: they fit on one screen.
WATCH_PEERS = 20


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
    print_line(json.dumps(answer, indent=2) if as_json else tables.status_text(answer))
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
        print_line(tables.columns(tables.PEER_COLUMNS, [tables.peer_row(peer) for peer in answer]))
    else:
        print_line("this node knows no peers")
    return 0


def watch(
    address: AddressOption = None,
    state_dir: StateDirOption = None,
    run: RunOption = None,
    config: ConfigOption = None,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
) -> int:
    """Follow a node until Ctrl-C: a table on a terminal, otherwise one line per second."""
    client = node_client(address, state_dir, config, token_file, run)
    try:
        if sys.stdout.isatty() and not as_json:
            _watch_table(client)
        else:
            _watch_lines(client, as_json)
    except KeyboardInterrupt:
        return 0


def leave(
    address: AddressOption = None,
    state_dir: StateDirOption = None,
    run: RunOption = None,
    config: ConfigOption = None,
    token_file: TokenFileOption = None,
) -> int:
    """Ask a node to leave: it hands over its shards and ends with exit code 0."""
    return _request(
        node_client(address, state_dir, config, token_file, run),
        "/leave",
        "is leaving; `p2pnode status` shows when it has ended",
    )


def pause(
    address: AddressOption = None,
    state_dir: StateDirOption = None,
    run: RunOption = None,
    config: ConfigOption = None,
    token_file: TokenFileOption = None,
) -> int:
    """Ask a node to pause training after its current step; it continues to own its shards."""
    return _request(node_client(address, state_dir, config, token_file, run), "/pause", "pauses after its current step")


def resume(
    address: AddressOption = None,
    state_dir: StateDirOption = None,
    run: RunOption = None,
    config: ConfigOption = None,
    token_file: TokenFileOption = None,
) -> int:
    """Ask a paused node to train again."""
    return _request(node_client(address, state_dir, config, token_file, run), "/resume", "trains again")


def trust(
    member: Annotated[str, typer.Argument(metavar="ID", help="Its node id, or the first 8 digits of it or more.")],
    address: AddressOption = None,
    state_dir: StateDirOption = None,
    run: RunOption = None,
    config: ConfigOption = None,
    token_file: TokenFileOption = None,
) -> int:
    """Have a node trust a member again that it leaves out (`members_distrusted` in /status)."""
    client = node_client(address, state_dir, config, token_file, run)
    return _request(client, f"/trust?{urlencode({'id': member})}", f"trusts {member} again")


def _request(client: NodeClient, path: str, outcome: str) -> int:
    client.post(path)
    print_line(f"the node at {client.address} {outcome}")
    return 0


def _watch_lines(client: NodeClient, as_json: bool) -> NoReturn:
    while True:
        answer = client.status()
        print_line(json.dumps(answer) if as_json else f"{time.strftime('%H:%M:%S')} {tables.status_line(answer)}")
        time.sleep(WATCH_INTERVAL_S)


def _watch_table(client: NodeClient) -> NoReturn:
    from rich.live import Live

    first = client.status()  # if the node is unreachable, fail before the table is drawn
    with Live(tables.watch_table(first, client.peers(), WATCH_PEERS), refresh_per_second=4) as live:
        while True:
            time.sleep(WATCH_INTERVAL_S)
            try:
                live.update(tables.watch_table(client.status(), client.peers(), WATCH_PEERS))
            except NotReachable as error:
                live.update(f"{error.message}\nlast seen {time.strftime('%H:%M:%S')}; still trying, Ctrl-C ends")
