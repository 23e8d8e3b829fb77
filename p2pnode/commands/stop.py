"""`p2pnode stop`: ends the nodes of a state directory, and waits until they have left."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from p2pnode.commands.options import ConfigOption, JsonOption, RunOption, StateDirOption, loaded, place_flags
from p2pnode.commands.output import print_line, print_notice
from p2pnode.errors import ExitCode, UserError

#: Longer than a script may take to finish (`training.finish_s`) and shards to be handed over.
TIMEOUT_S = 300.0


def stop(
    state_dir: StateDirOption = None,
    run: RunOption = None,
    config: ConfigOption = None,
    timeout: Annotated[float, typer.Option("--timeout", min=0, help="Longest wait in seconds.")] = TIMEOUT_S,
    now: Annotated[bool, typer.Option("--now", help="End it at once: nothing is handed over or saved.")] = False,
    as_json: JsonOption = False,
) -> int:
    """End the node on this machine: it hands its shards over and leaves; all nodes, where --local started several.

    Example: p2pnode stop --run digits
    """
    from p2pnode import background
    from p2pnode.screen import progress_bar

    folder = loaded(config, None, place_flags(state_dir, run), for_running=True).config.state_folder
    try:
        with progress_bar("leave") as bar:
            ended = background.stop(folder, timeout, bar.show, now=now)
    except KeyboardInterrupt:
        print_notice("the node goes on leaving; `p2pnode status` shows when it has ended")
        raise typer.Abort from None
    if as_json:
        print_line(json.dumps({"schema": 1, "ended": [_as_json(one) for one in ended]}, indent=2))
    for one in ended if not as_json else []:
        how = "was ended" if now else "has left" if one.is_clean else "ended without leaving"
        print_line(f"{one.node.node_id[:8]} {how} (process {one.node.pid}, after {one.seconds:.1f} s)")
        if one.left_behind:
            fields = ", ".join(f"{key} {value}" for key, value in one.left_behind.items())
            print_notice(f"nobody took over in time: {fields}")
    if not now and not all(one.is_clean for one in ended):
        raise UserError("a node ended without leaving", "see its log: p2pnode logs", ExitCode.UNEXPECTED)
    return 0


def _as_json(one: object) -> dict[str, object]:
    from p2pnode.background import Ended

    assert isinstance(one, Ended)
    return {
        "id": one.node.node_id,
        "pid": one.node.pid,
        "seconds": round(one.seconds, 3),
        "clean": one.is_clean,
        "left_behind": dict(one.left_behind),
    }
