"""Commands that query a running node or request a change of it: thin clients of its HTTP API."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from p2pnode.client import NodeClient
from p2pnode.commands.options import JsonOption, WhichNode, takes
from p2pnode.commands.output import print_answer, print_json, print_line, print_lines, print_notice
from p2pnode.errors import ExitCode, UserError
from p2pnode.terminal.status_view import peers_lines, status_lines

#: Longer than a script may take to finish (`training.finish_s`) and shards to be handed over.
LEAVE_TIMEOUT_S = 300.0


@takes(WhichNode)
def status(which: WhichNode, as_json: JsonOption = False) -> int:
    """Print whether this node is connected, whether it learns, what it waits for, and what to do.

    Example: p2pnode status --address 127.0.0.1:8080
    """
    answer = which.client().status()
    if as_json:
        print_line(json.dumps(answer, indent=2))
    else:
        print_lines(lambda style: status_lines(answer, style))
    return 0


@takes(WhichNode)
def peers(which: WhichNode, as_json: JsonOption = False) -> int:
    """List the live peers of this node, one line each."""
    answer = which.client().peers()
    if as_json:
        print_json({"peers": answer})
    elif answer:
        print_lines(lambda style: peers_lines(answer, style))
    else:
        print_line("this node knows no peers")
    return 0


@takes(WhichNode)
def pause(which: WhichNode, as_json: JsonOption = False) -> int:
    """Ask a node to pause training after its current step; it continues to own its shards."""
    return _request(which.client(), "pause", "pauses after its current step", as_json=as_json)


@takes(WhichNode)
def resume(which: WhichNode, as_json: JsonOption = False) -> int:
    """Ask a paused node to train again."""
    return _request(which.client(), "resume", "trains again", as_json=as_json)


@takes(WhichNode)
def leave(
    which: WhichNode,
    timeout: Annotated[float, typer.Option("--timeout", min=0, help="Longest wait in seconds.")] = LEAVE_TIMEOUT_S,
    now: Annotated[bool, typer.Option("--now", help="End it at once: nothing is handed over or saved.")] = False,
    as_json: JsonOption = False,
) -> int:
    """End the node on this machine: it hands its shards over and leaves; all nodes, where --local started several.

    It waits for the end of them. With --address or --token-file the node is asked, and the command does not wait.

    Example: p2pnode leave --run digits
    """
    if which.address is None and which.token_file is None:
        return _leave_here(which, timeout, now, as_json)
    if now:
        hint = "leave --now out, or name the node by --run or --state-dir on its own machine"
        raise UserError("--now ends a process, and --address names an API", hint, ExitCode.USAGE)
    done = "is leaving; `p2pnode status` shows when it has ended"
    return _request(which.client(), "leave", done, as_json=as_json)


def _leave_here(which: WhichNode, timeout: float, now: bool, as_json: bool) -> int:
    from p2pnode import background
    from p2pnode.screen import progress_bar

    folder = which.folder()
    try:
        with progress_bar("leave") as bar:
            ended = background.stop(folder, timeout, bar.show, now=now)
    except KeyboardInterrupt:
        print_notice("the node goes on leaving; `p2pnode status` shows when it has ended")
        raise typer.Abort from None
    if as_json:
        print_json({"ended": [one.as_json for one in ended]})
    for one in ended if not as_json else []:
        how = "was ended" if now else "has left" if one.is_clean else "ended without leaving"
        print_line(f"{one.node.node_id[:8]} {how} (process {one.node.pid}, after {one.seconds:.1f} s)")
        if one.left_behind:
            fields = ", ".join(f"{key} {value}" for key, value in one.left_behind.items())
            print_notice(f"nobody took over in time: {fields}")
    if not now and not all(one.is_clean for one in ended):
        raise UserError("a node ended without leaving", "see its log: p2pnode logs", ExitCode.UNEXPECTED)
    return 0


def _request(client: NodeClient, change: str, outcome: str, *, as_json: bool) -> int:
    client.post(f"/{change}")
    answer = {"address": client.address, "accepted": change}
    return print_answer(f"the node at {client.address} {outcome}", answer, as_json=as_json)
