"""The record of a state directory (`node.json`): whose it is, and the settings with which its node was started.

A directory belongs to one run and one layout of the model, for good. The record says which, whether this node founded
the swarm, and what earlier starts were told, so that a plain `p2pnode start` continues. It is written only when a node
has entered its swarm, or others have entered through it: a start that fails before leaves it as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from p2pnode.config.load import Loaded
from p2pnode.config.settings import KEYS, Config
from p2pnode.errors import ExitCode, UserError

RECORD_FILE = "node.json"
#: Far more than the record of a model with ten thousand tensors.
MAX_BYTES = 4 << 20

#: Kept whatever their source; all others only from the command line, because a file or the environment is still there
#: at the next start.
IDENTIFYING = frozenset(
    {
        "swarm.run",
        "swarm.bootstrap",
        "swarm.key_file",
        "swarm.allow_open",
        "swarm.discover",
        "node.host",
        "node.port",
        "node.advertise",
        "node.client_only",
        "node.nat",
        "node.role",
        "status.port",
        "training.task",
        "training.data_dir",
    }
)
#: Never kept: where the record itself is, and how much is logged.
PASSING_SECTIONS = ("log",)
#: Paths that a later start may read from another working directory.
PATHS = frozenset({"swarm.key_file", "training.data_dir", "status.token_file"})

OTHER_FROZEN = "what is not exchanged (frozen parameters, masks, tables of integers) had other values"


class DirectoryRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`node.json`. `founder` None: not known, as after the loss of the file. `model` is the digest of the layout, empty
    before it is known; `tensors` has the shape of each, as "256 x 64"; `frozen` is the digest of what is not exchanged.
    `shards` 0: not known."""

    schema: int = 1
    run: str = ""
    founder: bool | None = None
    model: str = ""
    tensors: dict[str, str] = {}
    frozen: str = ""
    shards: int = 0
    settings: dict[str, Any] = {}


class Given(NamedTuple):
    """A setting that somebody chose for this start, and whether on the command line."""

    value: Any
    on_command_line: bool


def encode(record: DirectoryRecord) -> bytes:
    """The content of the file."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def decode(content: bytes, where: object) -> DirectoryRecord:
    """The record in a file's content. Raises `UserError` that names the directory."""
    try:
        return msgspec.json.decode(content, type=DirectoryRecord)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UserError(
            f"cannot read {RECORD_FILE} in the state directory {where}: {error}",
            "restore it from a copy; or remove the file: the directory then belongs to the run of its checkpoints",
            ExitCode.STATE_DIRECTORY,
        ) from None


def read_record(folder: Path) -> DirectoryRecord:
    """The record of a directory; an empty one if there is none. Raises `UserError`."""
    try:
        with (folder / RECORD_FILE).open("rb") as file:
            content = file.read(MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return DirectoryRecord()
    except OSError as error:
        raise UserError(
            f"cannot read {folder / RECORD_FILE}: {error.strerror or error}",
            "check its permissions, or name another state directory with --state-dir",
            ExitCode.STATE_DIRECTORY,
        ) from None
    return decode(content, folder)


def given_in(loaded: Loaded) -> dict[str, Given]:
    """The chosen settings of a loaded configuration, by dotted key."""
    return {
        key: Given(getattr(getattr(loaded.config, section), name), key in loaded.on_command_line)
        for key in loaded.chosen
        for section, _, name in [key.partition(".")]
    }


def kept_settings(given: Mapping[str, Given], before: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for the record, after a start with `given`, by dotted key; those of `before` stay unless given
    anew."""
    kept = dict(before)
    for key, (value, on_command_line) in given.items():
        section = key.partition(".")[0]
        if key == "node.state_dir" or section in PASSING_SECTIONS or not (on_command_line or key in IDENTIFYING):
            continue
        if key == "swarm.key_file" and (value == "-" or value.startswith("$")):
            continue  # a key from standard input or the environment is in no file
        kept[key] = str(Path(value).expanduser().absolute()) if key in PATHS and value else value
    return dict(sorted(kept.items()))


def settings_of(record: DirectoryRecord) -> dict[str, Any]:
    """The recorded settings that this version knows. A founder's bootstraps are left out: it dials its stored peers,
    and opens the swarm again if none of them answers."""
    return {
        key: value
        for key, value in {"swarm.run": record.run, **record.settings}.items()
        if key in KEYS and value != "" and not (record.founder and key == "swarm.bootstrap")
    }


def check_run(run_there: str, config: Config, folder: Path) -> None:
    """Raise `UserError` (exit code 5) if the directory belongs to another run than the configuration names."""
    if run_there and run_there != config.swarm.run:
        raise UserError(
            f'the state directory {folder} belongs to run "{run_there}", and this start is for run '
            f'"{config.swarm.run}"',
            "name another directory with --state-dir, or leave --state-dir out: each run has its own; "
            f"`p2pnode forget --state-dir {folder}` removes what is there",
            ExitCode.MISMATCH,
        )


def check_model(record: DirectoryRecord, model: str, tensors: Mapping[str, str], frozen: str, folder: object) -> None:
    """Raise `UserError` (exit code 5) if the directory belongs to a model of another layout, or with other values in
    what is not exchanged; names a difference."""
    is_other = record.model not in ("", model)
    if not is_other and record.frozen in ("", frozen):
        return
    raise UserError(
        f'the state directory {folder} of run "{record.run}" belongs to another model: '
        f"{_difference(record.tensors, tensors) if is_other else OTHER_FROZEN}",
        "train a changed model under another name (--run) or in another directory (--state-dir); "
        f"`p2pnode forget --state-dir {folder}` removes what is there",
        ExitCode.MISMATCH,
    )


def _difference(there: Mapping[str, str], here: Mapping[str, str]) -> str:
    """The first difference between two models, in words."""
    for name, shape in there.items():
        if name not in here:
            return f'its "{name}" is not in the model of this start'
        if here[name] != shape:
            return f'its "{name}" is {shape}, and here it is {here[name]}'
    for name in here:
        if name not in there:
            return f'it has no "{name}", which the model of this start has'
    return "the types or the order of its tensors differ"
