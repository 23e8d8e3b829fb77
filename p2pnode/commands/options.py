"""Options that several commands share, and how they become a configuration or a client of a node."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer

from p2pnode.client import NodeClient, NotReachable, RunningNode, find, running_on
from p2pnode.config.directory_record import RECORD_FILE, read_record, settings_of
from p2pnode.config.load import Loaded, Override, load
from p2pnode.config.settings import Config
from p2pnode.config.state_folders import choose, run_of
from p2pnode.config.toml import toml
from p2pnode.errors import ExitCode, UserError
from p2pnode.keys.invitation_files import remembered_settings
from p2pnode.overlay.addresses import split_address

#: Read when no --config is given and it exists in the working directory.
DEFAULT_FILE = Path("node.toml")

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Configuration file; default: node.toml here, if there is one."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting; may be given several times."),
]
StateDirOption = Annotated[str | None, typer.Option("--state-dir", help="State directory (node.state_dir).")]
RunOption = Annotated[str | None, typer.Option("--run", help="Name of the run (swarm.run).")]
AddressOption = Annotated[
    str | None,
    typer.Option("--address", metavar="HOST:PORT", help="Where the node's HTTP API listens."),
]
TokenFileOption = Annotated[
    str | None,
    typer.Option("--token-file", help="File with the node's token; default: the file of the node on this machine."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show stack traces and debug events.")]


#: Dotted key to a flag and its value as TOML.
Flags = dict[str, tuple[str, str | None]]


def place_flags(state_dir: str | None, run: str | None) -> Flags:
    """The flags that say which state directory is meant."""
    return {
        "node.state_dir": ("--state-dir", None if state_dir is None else toml(state_dir)),
        "swarm.run": ("--run", None if run is None else toml(run)),
    }


def loaded(
    config: Path | None,
    settings: list[str] | None,
    flags: Flags,
    *,
    joining: bool = False,
    for_running: bool = False,
) -> Loaded:
    """The configuration from file, environment, flags (key → flag and its value) and --set, in this order; below them
    what the state directory remembers.

    `joining`: a swarm key is about to be written to the state directory, so a missing one is not an error.
    `for_running`: the command asks a node, so of several state directories the one whose node runs is meant.
    """
    overrides = [Override(key, text, flag) for key, (flag, text) in flags.items() if text is not None]
    overrides += [_assignment(text) for text in settings or []]
    if config is None and DEFAULT_FILE.is_file():
        config = DEFAULT_FILE
    remembered = functools.partial(_remembered, joining=joining, for_running=for_running)
    return load(config, os.environ, overrides, remembered=remembered)


def _remembered(found: Config, chosen: Container[str], *, joining: bool, for_running: bool) -> list[Override]:
    """The state directory, if no setting names one, and what is remembered in it."""
    overrides = []
    folder = found.state_folder
    if not found.node.state_dir:
        run = found.swarm.run if "swarm.run" in chosen else ""
        choice = choose(run, lambda place: running_in(place) is not None, for_running=for_running)
        folder = choice.folder
        overrides.append(Override("node.state_dir", toml(str(folder)), choice.origin))
    if "swarm.run" in chosen and run_of(folder) not in ("", found.swarm.run):
        return overrides  # of another run: the start refuses it, and nothing of it applies
    overrides += remembered_settings(folder, os.environ, joining=joining, founder=bool(read_record(folder).founder))
    place = str(folder / RECORD_FILE)
    overrides += [Override(key, toml(value), place) for key, value in settings_of(read_record(folder)).items()]
    if (run := run_of(folder)) and "swarm.run" not in chosen:
        overrides.append(Override("swarm.run", toml(run), str(folder)))  # its record is lost
    return overrides


def running_in(folder: Path) -> RunningNode | None:
    """The node that runs on a state directory, or the first one that `--local` started there."""
    return next(iter(running_on(folder).values()), None)


def _assignment(text: str) -> Override:
    key, equals, value = text.partition("=")
    if not equals or "." not in key:
        hint = "write --set section.key=value, such as --set node.port=8469"
        raise UserError(f'--set "{text}" is not an assignment', hint, ExitCode.CONFIGURATION)
    return Override(key.strip(), value.strip(), f"--set {key.strip()}")


class Place(NamedTuple):
    """The options that say which configuration, and so which state directory, a command is about."""

    config: ConfigOption = None
    state_dir: StateDirOption = None
    run: RunOption = None
    settings: SetOption = None

    def loaded(
        self, further: Mapping[str, tuple[str, str | None]] = {}, *, joining: bool = False, for_running: bool = False
    ) -> Loaded:
        """The configuration, with further flags; see `loaded`."""
        flags = place_flags(self.state_dir, self.run) | dict(further)
        return loaded(self.config, self.settings, flags, joining=joining, for_running=for_running)


class WhichNode(NamedTuple):
    """The options that say which node a command is about."""

    address: AddressOption = None
    state_dir: StateDirOption = None
    run: RunOption = None
    config: ConfigOption = None
    token_file: TokenFileOption = None

    def _config(self) -> Config:
        return Place(self.config, self.state_dir, self.run).loaded(for_running=True).config

    def folder(self) -> Path:
        """The state directory of a node on this machine."""
        return self._config().state_folder

    def client(self) -> NodeClient:
        """A client of the node at `address`, or else of the one that runs on the state directory, or at [status].

        With an address alone, the token of the state directory is used only if its node listens at that address.
        """
        if self.address is not None:
            try:
                split_address(self.address)
            except ValueError as error:
                raise UserError(f"--address: {error}", "write --address 127.0.0.1:8080", ExitCode.USAGE) from None
            return NodeClient(self.address, token_file=self.token_file or self._own_token_file(self.address))
        settings = self._config()
        folder = settings.state_folder
        if (running := running_in(folder)) is not None:
            return NodeClient(running.address, token_file=self.token_file or running.token_file)
        ended = find(folder)
        if self.state_dir is None and ended is None and settings.status.port:
            host = f"[{settings.status.host}]" if ":" in settings.status.host else settings.status.host
            return NodeClient(f"{host}:{settings.status.port}", token_file=self.token_file or "")
        gone = f"; its process {ended.pid} has ended" if ended else ""
        raise NotReachable(
            f"no node runs on the state directory {folder}{gone}",
            "start one with `p2pnode start`, or name its address with --address HOST:PORT or --state-dir DIR",
        )

    def _own_token_file(self, address: str) -> str:
        """The token file of the state directory, if its node listens at `address`; otherwise empty."""
        try:
            folder = self.folder()
        except UserError:  # with an address the configuration need not be valid
            return ""
        wanted = address.replace("localhost:", "127.0.0.1:", 1)
        return next((node.token_file for node in running_on(folder).values() if node.address == wanted), "")


def takes(options: type[Any]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command the options of a named tuple, which it gets as its first argument."""
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for (name, annotation), default in zip(
            get_type_hints(options, include_extras=True).items(), options._field_defaults.values(), strict=True
        )
    ]

    def give(command: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(command)
        def called(*arguments: Any, **given: Any) -> int:
            taken = options(**{one.name: given.pop(one.name) for one in shared if one.name in given})
            return command(taken, *arguments, **given)

        _, *others = inspect.signature(command, eval_str=True).parameters.values()
        own = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in others]
        called.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
        del called.__wrapped__  # typer would read the types of its arguments instead
        called.__annotations__ = {}
        return called

    return give
