"""`p2pnode start` and `p2pnode run`: load the configuration and run the daemon in this process.

Imports stay light, because the daemon keeps them in memory for weeks.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from p2pnode.commands.options import ConfigOption, DebugOption, SetOption, StateDirOption, loaded
from p2pnode.config.documentation import toml
from p2pnode.config.settings import Config
from p2pnode.errors import ExitCode, UserError

BootstrapOption = Annotated[
    list[str] | None,
    typer.Option("--bootstrap", "-b", metavar="HOST:PORT", help="A peer to join through; may be given several times."),
]
PortOption = Annotated[str | None, typer.Option("--port", "-p", help="Port of the overlay and exchange (node.port).")]
StatusPortOption = Annotated[str | None, typer.Option("--status-port", help="Port of the HTTP API (status.port).")]
RunOption = Annotated[str | None, typer.Option("--run", help="Name of the run (swarm.run).")]
TaskOption = Annotated[str | None, typer.Option("--task", help="Task to train (training.task).")]
InviteOption = Annotated[
    str | None,
    typer.Option(
        "--invite", metavar="LINE", help="An invitation, a file with one, or - to read it from standard input."
    ),
]
DataDirOption = Annotated[str | None, typer.Option("--data-dir", help="The task's data (training.data_dir).")]


def start(
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    invite: InviteOption = None,
    port: PortOption = None,
    status_port: StatusPortOption = None,
    state_dir: StateDirOption = None,
    run: RunOption = None,
    task: TaskOption = None,
    data_dir: DataDirOption = None,
    settings: SetOption = None,
    debug: DebugOption = False,
) -> int:
    """Start a node in the foreground; it founds a swarm, or joins one with --invite or --bootstrap.

    Logs go to stderr. Ctrl-C or SIGTERM leaves gracefully, a second one at once.

    Example: p2pnode start --task digits --bootstrap 10.0.0.5:8468
    """
    flags = _flags(bootstrap, port, status_port, state_dir, run, task, data_dir, debug)
    _accept_invitation(invite, config, settings, flags)
    return _daemon(loaded(config, settings, flags).config, None)


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…", help="Your training program.")],
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    invite: InviteOption = None,
    port: PortOption = None,
    status_port: StatusPortOption = None,
    state_dir: StateDirOption = None,
    run: RunOption = None,
    settings: SetOption = None,
    debug: DebugOption = False,
) -> int:
    """Start a node around your own training program, which calls p2pnode.attach.

    Example: p2pnode run --bootstrap 10.0.0.5:8468 -- python train.py --lr 0.1
    """
    if shutil.which(command[0]) is None:
        hint = "give a program, such as: p2pnode run -- python train.py"
        raise UserError(f'there is no program "{command[0]}" to run', hint, ExitCode.TRAINER)
    flags = _flags(bootstrap, port, status_port, state_dir, run, None, None, debug)
    _accept_invitation(invite, config, settings, flags)
    return _daemon(loaded(config, settings, flags).config, command)


def _accept_invitation(
    invite: str | None, config: Path | None, settings: list[str] | None, flags: dict[str, tuple[str, str | None]]
) -> None:
    """Store the invitation in the state directory, for this start and every later one.

    An invitation on the command line shows the swarm key in the list of processes. This process then executes itself
    again without it.
    """
    if invite is None:
        return
    from p2pnode.commands.key import is_inline, take

    folder = loaded(config, settings, {"node.state_dir": flags["node.state_dir"]}, joining=True).config.state_folder
    take(invite, folder)
    if is_inline(invite):
        os.execv(sys.executable, [sys.executable, *_without_invite(sys.orig_argv[1:])])  # noqa: S606


def _without_invite(arguments: list[str]) -> list[str]:
    """The command line without its first --invite and that option's value."""
    for at, argument in enumerate(arguments):
        if argument == "--invite":
            return arguments[:at] + arguments[at + 2 :]
        if argument.startswith("--invite="):
            return arguments[:at] + arguments[at + 1 :]
    return arguments


def _daemon(config: Config, command: list[str] | None) -> int:
    gc.disable()  # imported objects stay anyway; `p2pnode.malloc` collects once after the start
    from p2pnode import daemon

    gc.enable()
    return int(daemon.run(config, command=command))


def _flags(
    bootstrap: list[str] | None,
    port: str | None,
    status_port: str | None,
    state_dir: str | None,
    run: str | None,
    task: str | None,
    data_dir: str | None,
    debug: bool,
) -> dict[str, tuple[str, str | None]]:
    return {
        "swarm.bootstrap": ("--bootstrap", toml(bootstrap) if bootstrap else None),
        "node.port": ("--port", port),
        "status.port": ("--status-port", status_port),
        "node.state_dir": ("--state-dir", _text(state_dir)),
        "swarm.run": ("--run", _text(run)),
        "training.task": ("--task", _text(task)),
        "training.data_dir": ("--data-dir", _text(data_dir)),
        "log.level": ("--debug", "debug" if debug else None),
    }


def _text(value: str | Path | None) -> str | None:
    """The value of a text option, quoted so that it is not read as another TOML type."""
    return None if value is None else toml(str(value))
