"""`p2pnode start` and `p2pnode run`: load the configuration and run the daemon in this process.

Imports stay light, because the daemon keeps them in memory for weeks.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

from p2pnode.commands.options import (
    ConfigOption,
    DebugOption,
    Flags,
    JsonOption,
    RunOption,
    SetOption,
    StateDirOption,
    loaded,
    place_flags,
    takes,
)
from p2pnode.commands.output import print_json, print_line, print_notice
from p2pnode.config.directory_record import given_in
from p2pnode.config.load import Loaded
from p2pnode.config.rules import check_start, warnings_for_script
from p2pnode.config.settings import Config
from p2pnode.config.toml import toml
from p2pnode.errors import ExitCode, UserError
from p2pnode.local_run import OWN, with_count
from p2pnode.training.devices.gpus import torch_cuda, unused_gpu

if TYPE_CHECKING:
    from p2pnode.overlay.sealing.invitation import Invitation


class StartCommand(TyperCommand):
    """A command whose option `--local` may stand without its number."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Add the number where it is missing."""
        options = [option for option in self.params if option.param_type_name == "option"]
        takes_value = {name for option in options if not getattr(option, "is_flag", False) for name in option.opts}
        return super().parse_args(ctx, with_count(args, takes_value, stops_at_program=not self.allow_interspersed_args))


BootstrapOption = Annotated[
    list[str] | None,
    typer.Option("--bootstrap", "-b", metavar="HOST:PORT", help="A peer to join through; may be given several times."),
]
PortOption = Annotated[str | None, typer.Option("--port", "-p", help="Port of the overlay and exchange (node.port).")]
StatusPortOption = Annotated[str | None, typer.Option("--status-port", help="Port of the HTTP API (status.port).")]
ReopenOption = Annotated[
    bool, typer.Option("--reopen", help="Open the swarm again from this node's state, if its founder is lost.")
]
LocalOption = Annotated[
    int,
    typer.Option(
        "--local",
        metavar="[N]",
        min=0,
        max=64,
        show_default=False,
        help="Start N nodes on this machine, or one more beside those that run; each has its own directory and ports.",
    ),
]
ServersOption = Annotated[
    int,
    typer.Option(
        "--servers",
        metavar="N",
        min=0,
        max=64,
        show_default=False,
        help="How many nodes of --local are servers of a parameter server; the others are its workers.",
    ),
]
BackgroundOption = Annotated[
    bool,
    typer.Option("--background", help="Return when it runs; `p2pnode logs` shows its log, `p2pnode leave` ends it."),
]
TaskOption = Annotated[str | None, typer.Option("--task", help="Task to train (training.task).")]
InviteOption = Annotated[
    str | None,
    typer.Option(
        "--invite", metavar="LINE", help="An invitation, a file with one, or - to read it from standard input."
    ),
]
DataDirOption = Annotated[str | None, typer.Option("--data-dir", help="The task's data (training.data_dir).")]


class StartOptions(NamedTuple):
    """What `start` and `run` take both."""

    config: ConfigOption = None
    bootstrap: BootstrapOption = None
    invite: InviteOption = None
    port: PortOption = None
    status_port: StatusPortOption = None
    state_dir: StateDirOption = None
    run: RunOption = None
    settings: SetOption = None
    reopen: ReopenOption = False
    local: LocalOption = 0
    background: BackgroundOption = False
    as_json: JsonOption = False
    debug: DebugOption = False

    @property
    def flags(self) -> Flags:
        return place_flags(self.state_dir, self.run) | {
            "swarm.bootstrap": ("--bootstrap", toml(self.bootstrap) if self.bootstrap else None),
            "node.port": ("--port", self.port),
            "status.port": ("--status-port", self.status_port),
            "log.level": ("--debug", "debug" if self.debug else None),
        }


@takes(StartOptions)
def start(options: StartOptions, task: TaskOption = None, data_dir: DataDirOption = None) -> int:
    """Start a node in the foreground; it founds a swarm, or joins one with --invite or --bootstrap.

    What it is told is kept in its state directory, so a later `p2pnode start` continues. Logs go to stderr. Ctrl-C or
    SIGTERM leaves gracefully, a second one at once.

    Example: p2pnode start --run digits --task digits --bootstrap 10.0.0.5:8468, or three nodes here: p2pnode start
    --local 3
    """
    trained = {
        "training.task": ("--task", None if task is None else toml(task)),
        "training.data_dir": ("--data-dir", None if data_dir is None else toml(data_dir)),
    }
    return _start(_Request(options, options.flags | trained))


@takes(StartOptions)
def run(
    options: StartOptions,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…", help="Your training program.")],
    servers: ServersOption = 0,
) -> int:
    """Start a node around your own program, which calls p2pnode.attach to train, or p2pnode.engine.

    Example: p2pnode run --bootstrap 10.0.0.5:8468 -- python train.py --lr 0.1
    """
    if servers > options.local:
        raise UserError(
            f"--servers {servers}: that many of the nodes of --local, of which there are {options.local}",
            f"give --local {servers + 1} or more; a node that starts alone is a server with --set node.role=server",
            ExitCode.USAGE,
        )
    if shutil.which(command[0]) is None:
        hint = "give a program, such as: p2pnode run -- python train.py"
        raise UserError(f'there is no program "{command[0]}" to run', hint, ExitCode.TRAINER)
    return _start(_Request(options, options.flags, command, servers))


class _Request(NamedTuple):
    """The command line of `start` or `run`."""

    options: StartOptions
    flags: Flags
    command: list[str] | None = None
    servers: int = 0

    def arguments(self, *left_out: str) -> list[str]:
        """The options as another process gets them, without the settings `left_out`."""
        found = [] if self.options.config is None else ["--config", str(self.options.config)]
        for key, (_, text) in self.flags.items():
            if text is not None and key not in left_out:
                found += ["--set", f"{key}={text}"]
        for setting in self.options.settings or []:
            found += ["--set", setting]
        return found


def _start(request: _Request) -> int:
    options = request.options
    if options.as_json and not options.background:
        hint = "add --background; a node in the foreground prints JSON with --set log.format=json"
        raise UserError("--json describes a node that was started with --background", hint, ExitCode.USAGE)
    invitation, flags = None, request.flags
    if options.invite is not None:
        from p2pnode.commands.key import is_inline, read_invitation

        invitation = read_invitation(options.invite)
        if is_inline(options.invite):
            _start_again_without(options.invite)
        flags = flags | _invited(invitation, flags)
    found = loaded(options.config, options.settings, flags, joining=invitation is not None)
    for problem in check_start(found.config):
        raise UserError(problem.what, problem.do, ExitCode.CONFIGURATION)
    for problem in warnings_for_script(found.config, found.origins) if request.command is not None else []:
        sys.stderr.write(f"warning: {problem.what}\nhint: {problem.do}\n")
    cuda = torch_cuda()
    unused = unused_gpu(str(found.config.training.device), cuda, is_available=cuda != "")
    # A script may run in another Python; of several nodes in the foreground each says it.
    if unused and request.command is None and (options.background or not options.local):
        sys.stderr.write(f"warning: {unused[0]}\nhint: {unused[1]}\n")
    if options.background:
        return _in_background(request, found, invitation)
    if options.local:
        return _several(request, found, invitation)
    return _daemon(
        found.config,
        command=request.command,
        invitation=invitation,
        given=given_in(found),
        reopens=options.reopen,
    )


def _several(request: _Request, found: Loaded, invitation: Invitation | None) -> int:
    """Start nodes beside each other, each told what this command was told."""
    from p2pnode.local_run import LocalStart, run_local

    line = "" if invitation is None else invitation.line
    return run_local(
        LocalStart(
            found,
            request.options.local,
            request.arguments(*OWN),
            request.command,
            line,
            request.options.reopen,
            request.servers,
        )
    )


def _in_background(request: _Request, found: Loaded, invitation: Invitation | None) -> int:
    """Start this as a process of its own, and say how it is seen and ended."""
    from p2pnode import background
    from p2pnode.keys.key_files import MAX_FILE_BYTES, own_input
    from p2pnode.log_file import LOG_FILE
    from p2pnode.screen import progress_bar

    folder = found.config.state_folder
    arguments = ["start" if request.command is None else "run", *request.arguments("node.state_dir")]
    arguments += ["--set", f"node.state_dir={toml(str(folder.absolute()))}"]
    if "log.format" not in found.chosen:
        arguments += ["--set", 'log.format="json"']
    if request.options.local:
        arguments += ["--local", str(request.options.local)]
        arguments += ["--servers", str(request.servers)] if request.command else []
    if request.options.reopen:
        arguments.append("--reopen")
    given = b""
    if invitation is not None:
        arguments += ["--invite", "-"]
        given = invitation.line.encode()
    elif found.config.swarm.key_file == "-":
        given = own_input().read(MAX_FILE_BYTES)
    if request.command is not None:
        arguments += ["--", *request.command]
    asked = background.Background(arguments, folder, given, request.options.local)
    try:
        with progress_bar("start") as bar:
            nodes = background.start(asked, bar.show)
    except KeyboardInterrupt:
        print_notice("broken off: the node has ended")
        raise
    if request.options.as_json:
        print_json({"nodes": [background.as_json(node) for node in nodes], "log": str(asked.log_folder / LOG_FILE)})
        return 0
    where = f" --state-dir {folder}" if request.options.state_dir is not None else ""
    for node in nodes:
        print_line(f"{node.node_id[:8]} runs in the background (process {node.pid}, HTTP API at {node.address})")
        print_line(f"          {background.summary_of(node)}")
    print_line(f"its log: p2pnode logs --follow{where}")
    print_line(f"         {asked.log_folder / LOG_FILE}")
    print_line(f"its end: p2pnode leave{where}")
    return 0


def _invited(invitation: Invitation, flags: Flags) -> Flags:
    """The flags that an invitation stands for. Raises `UserError` if --run names another run."""
    named = flags["swarm.run"][1]
    if named is not None and named != toml(invitation.run):
        raise UserError(
            f'the invitation is to run "{invitation.run}", and --run names {named}',
            "leave --run out, or take an invitation to that run",
            ExitCode.MISMATCH,
        )
    found: Flags = {"swarm.run": ("--invite", toml(invitation.run))}
    if flags["swarm.bootstrap"][1] is None and invitation.addresses:
        found["swarm.bootstrap"] = ("--invite", toml(list(invitation.addresses)))
    return found


def _start_again_without(line: str) -> None:
    """Execute this process again with the invitation on standard input: on the command line it would show the swarm key
    in the list of processes."""
    reading, writing = os.pipe()
    os.write(writing, line.encode("utf-8", "replace"))  # far less than a pipe holds
    os.close(writing)
    os.dup2(reading, sys.stdin.fileno())
    os.execv(sys.executable, [sys.executable, *_without_invite(sys.orig_argv[1:])])  # noqa: S606


def _without_invite(arguments: list[str]) -> list[str]:
    """The command line with - as the value of its first --invite."""
    for at, argument in enumerate(arguments):
        if argument == "--invite":
            return [*arguments[: at + 1], "-", *arguments[at + 2 :]]
        if argument.startswith("--invite="):
            return [*arguments[:at], "--invite=-", *arguments[at + 1 :]]
    return arguments


def _daemon(config: Config, **request: Any) -> int:
    gc.disable()  # imported objects stay anyway; `p2pnode.own_memory` collects once after the start
    from p2pnode import daemon

    gc.enable()
    return int(daemon.run(config, **request))
