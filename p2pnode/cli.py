"""The command line: registers the commands and turns errors into one sentence, a hint and an exit code.

`main` is the console script. The commands are in `p2pnode.commands`. They import aiohttp, rich and the daemon inside
their functions, so `p2pnode --help` and `p2pnode status` answer at once.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
import typer.main

from p2pnode import __version__
from p2pnode.commands import (
    advise,
    ask,
    dashboard,
    demo,
    doctor,
    files,
    forget,
    key,
    logs,
    records,
    simulate,
    start,
    watch,
)
from p2pnode.commands.output import print_error, print_line
from p2pnode.errors import INTERRUPTED, ExitCode, UserError

app = typer.Typer(
    name="p2pnode",
    help="Train one model on machines without a coordinator.",
    epilog="Example: p2pnode demo   (a swarm of four on this machine)",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _register() -> None:
    app.command("demo")(demo.demo)
    app.command("start", cls=start.StartCommand)(start.start)
    # Options after the program's name belong to the program: `run python train.py --port 1`.
    app.command("run", cls=start.StartCommand, context_settings={"allow_interspersed_args": False})(start.run)
    for command in (
        ask.status,
        ask.peers,
        watch.watch,
        logs.logs,
        ask.leave,
        ask.pause,
        ask.resume,
    ):
        app.command(command.__name__)(command)
    app.command("stop", hidden=True)(ask.leave)
    app.command("doctor")(doctor.doctor)
    app.command("dashboard")(dashboard.dashboard)
    app.command("init")(files.init)
    app.command("export")(files.export)
    app.command("forget")(forget.forget)
    app.add_typer(files.config_app, name="config")
    simulate.simulate_app.command("advise")(advise.advise)
    app.add_typer(simulate.simulate_app, name="simulate")
    app.add_typer(key.key_app, name="key")
    app.add_typer(records.records_app, name="records")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> int:
    if version:
        print_line(f"p2pnode {__version__}")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        print_line(context.get_help())
        raise typer.Exit(ExitCode.USAGE)
    return 0


_register()


@functools.cache
def commands() -> Callable[..., Any]:
    """All commands with their options. Typer makes them of the signatures, for 30 ms, again at each call of `app`."""
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (`p2pnode.errors`)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments[: arguments.index("--")] if "--" in arguments else "--debug" in arguments
    try:
        return int(commands()(arguments, prog_name="p2pnode", standalone_mode=False) or 0)
    except UserError as error:
        if debug:
            traceback.print_exc()
        print_error(error.message, error.hint)
        return error.exit_code
    except typer.TyperException as error:
        print_error(error.format_message(), "p2pnode --help lists the commands, p2pnode COMMAND --help its options")
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has closed the pipe (`p2pnode peers | head`): not an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            traceback.print_exc()
        print_error(
            f"unexpected {type(error).__name__}: {error}", "run it again with --debug and report what it prints"
        )
        return ExitCode.UNEXPECTED


if __name__ == "__main__":
    sys.exit(main())
