"""All settings of a node as one typed struct, and the table of their keys."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import quote

import msgspec
from msgspec import Meta

from p2pnode.overlay.settings import NodeSettings, Port, SwarmSettings
from p2pnode.training.settings import (
    BarrierSettings,
    DevicesSettings,
    DispatchSettings,
    ExchangeSettings,
    TrainingSettings,
)

#: Holds one state directory per run, unless `node.state_dir` names another.
STATE_HOME = "~/.local/state/p2pnode"
MAX_FOLDER_NAME = 100


class StatusSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The HTTP API for people, the command line and monitors."""

    host: Annotated[
        str,
        Meta(description="Address of the HTTP API; beyond the loopback every request needs the token."),
    ] = "127.0.0.1"
    port: Annotated[Port, Meta(description="Port of the HTTP API; 0 takes a free one.")] = 8080
    token_file: Annotated[
        str,
        Meta(description="File with the API's token, created if missing; empty: status.token in the state directory."),
    ] = ""
    names: Annotated[
        list[str],
        Meta(
            max_length=64,
            description="Host names, besides addresses, the API accepts; others are refused (DNS rebinding).",
        ),
    ] = []


class LogSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is logged, and in which format. Logs go to standard error."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Lowest level that is logged: debug, info, warning or error."),
    ] = "info"
    format: Annotated[
        Literal["auto", "console", "json"],
        Meta(description="console for people, json for machines; auto: console on a terminal."),
    ] = "auto"


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every setting of a node, by section of `node.toml`."""

    node: NodeSettings = msgspec.field(default_factory=NodeSettings)
    swarm: SwarmSettings = msgspec.field(default_factory=SwarmSettings)
    training: TrainingSettings = msgspec.field(default_factory=TrainingSettings)
    devices: DevicesSettings = msgspec.field(default_factory=DevicesSettings)
    barrier: BarrierSettings = msgspec.field(default_factory=BarrierSettings)
    exchange: ExchangeSettings = msgspec.field(default_factory=ExchangeSettings)
    dispatch: DispatchSettings = msgspec.field(default_factory=DispatchSettings)
    status: StatusSettings = msgspec.field(default_factory=StatusSettings)
    log: LogSettings = msgspec.field(default_factory=LogSettings)

    @property
    def state_folder(self) -> Path:
        """`node.state_dir`, or the default of the run, with `~` resolved; a relative one starts at the working
        directory."""
        return Path(self.node.state_dir or f"{STATE_HOME}/{folder_name(self.swarm.run)}").expanduser()


#: Section name to its settings struct, in the order of the file.
SECTIONS: dict[str, type[msgspec.Struct]] = {info.name: info.type for info in msgspec.structs.fields(Config)}
#: Dotted key to what msgspec knows of it (`type`, `default`), in the order of the file.
KEYS: dict[str, msgspec.structs.FieldInfo] = {
    f"{section}.{info.name}": info for section in SECTIONS for info in msgspec.structs.fields(SECTIONS[section])
}


def keys_of(section: str) -> list[str]:
    """The names of the settings of a section, in the order of the file."""
    return [key.split(".")[1] for key in KEYS if key.startswith(f"{section}.")]


def folder_name(run: str) -> str:
    """The name of a run's default state directory: the run itself where it is a plain name, otherwise coded.

    Different runs get different names; none is hidden, has a slash, or is `.` or `..`.
    """
    name = quote(run, safe=" @+=,")
    if name.startswith((".", "~")):
        name = f"%{ord(name[0]):02X}{name[1:]}"
    if len(name) > MAX_FOLDER_NAME:
        name = f"{name[:MAX_FOLDER_NAME]}-{hashlib.sha256(run.encode()).hexdigest()[:8]}"
    return name
