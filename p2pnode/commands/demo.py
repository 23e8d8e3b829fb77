"""`p2pnode demo`: checks the options, then runs the demo."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from p2pnode.commands.options import JsonOption
from p2pnode.config.load import SettingError
from p2pnode.config.rules import check
from p2pnode.errors import ExitCode, UserError
from p2pnode.training.settings import BarrierMethod

_BARRIERS = get_args(BarrierMethod)


def demo(
    nodes: Annotated[int, typer.Option("--nodes", "-n", min=1, max=64, help="Daemons to start.")] = 4,
    task: Annotated[str, typer.Option("--task", help="digits, mnist, or your own package.module:Class.")] = "digits",
    data_dir: Annotated[str, typer.Option("--data-dir", help="The task's data; empty: its own.")] = "",
    until: Annotated[float, typer.Option("--until", min=0.0, max=1.0, help="Accuracy that ends it.")] = 0.95,
    barrier: Annotated[str, typer.Option("--barrier", help=f"One of {', '.join(_BARRIERS)}.")] = "pssp",
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", min=1.0, help="Seconds after which it fails; 180, and 900 for mnist."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the training.")] = 0,
    as_json: JsonOption = False,
    keep: Annotated[
        Path | None, typer.Option("--keep", help="Keep the nodes' files and logs under this folder.")
    ] = None,
) -> int:
    """Train one model on several daemons on this machine, each with an insufficient part of the data.

    Exit code 0 when the goal was reached, 10 otherwise. With --json the last line is one JSON object.

    Example: p2pnode demo --nodes 4 --task digits --until 0.95
    """
    from p2pnode.demo.plan import DEFAULT_TIME_LIMIT_S, TIME_LIMIT_S, DemoPlan, node_config
    from p2pnode.demo.run import run

    if barrier not in _BARRIERS:
        raise UserError(f'--barrier "{barrier}" is not a barrier', f"one of {', '.join(_BARRIERS)}", ExitCode.USAGE)
    if task == "text":
        hint = "use digits or mnist, or a task of your own that does"
        raise UserError("the task text measures no accuracy, so the demo cannot detect success", hint, ExitCode.USAGE)
    if data_dir:
        data_dir = str(Path(data_dir).expanduser().resolve())
        if not os.access(data_dir, os.R_OK):
            raise UserError(
                f"cannot read --data-dir {data_dir}", "check the path and its permissions", ExitCode.TRAINER
            )
    plan = DemoPlan(
        nodes=nodes,
        task=task,
        data_dir=data_dir,
        until=until,
        barrier=cast(BarrierMethod, barrier),
        time_limit_s=time_limit or TIME_LIMIT_S.get(task, DEFAULT_TIME_LIMIT_S),
        seed=seed,
        keep=keep,
    )
    for problem in check(node_config(plan, Path("demo"))):
        raise UserError(str(SettingError("", *problem)), problem.do, ExitCode.CONFIGURATION)
    return run(plan, as_json=as_json)
