"""Options that several commands share, and how they become a configuration or a client of a node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from overlay.addresses import split_address
from p2pnode.client import NodeClient, NotReachable, find
from p2pnode.config.load import Loaded, Override, load
from p2pnode.errors import ExitCode, UserError
from p2pnode.keys.invitation_files import remembered_settings

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


def loaded(
    config: Path | None,
    settings: list[str] | None,
    flags: dict[str, tuple[str, str | None]],
    *,
    joining: bool = False,
) -> Loaded:
    """The configuration from file, environment, flags (key → flag and its value) and --set, in this order.

    `joining`: a swarm key is about to be written to the state directory, so a missing one is not an error.
    """
    overrides = [Override(key, text, flag) for key, (flag, text) in flags.items() if text is not None]
    overrides += [_assignment(text) for text in settings or []]
    if config is None and DEFAULT_FILE.is_file():
        config = DEFAULT_FILE
    return load(
        config,
        os.environ,
        overrides,
        remembered=lambda found: remembered_settings(found.state_folder, os.environ, joining=joining),
    )


def _assignment(text: str) -> Override:
    key, equals, value = text.partition("=")
    if not equals or "." not in key:
        hint = "write --set section.key=value, such as --set node.port=8469"
        raise UserError(f'--set "{text}" is not an assignment', hint, ExitCode.CONFIGURATION)
    return Override(key.strip(), value.strip(), f"--set {key.strip()}")


def node_client(
    address: str | None, state_dir: str | None, config: Path | None, token_file: str | None = None
) -> NodeClient:
    """A client of the node at `address`, or else of the one that runs on the state directory, or at [status].

    With an address alone, the token of the state directory is used only if its node listens at that address.
    """
    if address is not None:
        try:
            split_address(address)
        except ValueError as error:
            raise UserError(f"--address: {error}", "write --address 127.0.0.1:8080", ExitCode.USAGE) from None
        return NodeClient(address, token_file=token_file or _own_token_file(address, state_dir, config))
    settings = loaded(config, None, {"node.state_dir": ("--state-dir", state_dir)}).config
    found = find(settings.state_folder)
    if found is not None and found.alive:
        return NodeClient(found.address, token_file=token_file or found.token_file)
    if state_dir is None and found is None and settings.status.port:
        host = f"[{settings.status.host}]" if ":" in settings.status.host else settings.status.host
        return NodeClient(f"{host}:{settings.status.port}", token_file=token_file or "")
    gone = f"; its process {found.pid} has ended" if found else ""
    raise NotReachable(
        f"no node runs on the state directory {settings.state_folder}{gone}",
        "start one with `p2pnode start`, or name its address with --address HOST:PORT or --state-dir DIR",
    )


def _own_token_file(address: str, state_dir: str | None, config: Path | None) -> str:
    """The token file of the state directory, if its node listens at `address`; otherwise empty."""
    try:
        settings = loaded(config, None, {"node.state_dir": ("--state-dir", state_dir)}).config
    except UserError:  # with an address the configuration need not be valid
        return ""
    found = find(settings.state_folder)
    is_it = found is not None and found.alive and found.address == address.replace("localhost:", "127.0.0.1:", 1)
    return found.token_file if found is not None and is_it else ""
