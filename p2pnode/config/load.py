"""Loads the configuration: merges file, environment and flags, converts every value, and checks it.

Precedence: default < remembered in the state directory < `node.toml` < environment `P2PNODE_SECTION__KEY` < flags and
`--set section.key=value`. Every key is checked by itself, so an error names the key, its source, the value and what is
allowed. Defaults and ranges are in the settings structs (`p2pnode.config.settings`); `p2pnode.config.rules` checks
combinations. The only I/O is reading the file.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from p2pnode.config.rules import check
from p2pnode.config.settings import KEYS, SECTIONS, Config, keys_of
from p2pnode.config.values import InvalidValue, converted, kind_of, nearest, parsed
from p2pnode.errors import ExitCode, UserError

#: Prefix of the environment variables; only names with a double underscore are settings.
ENVIRONMENT_PREFIX = "P2PNODE_"
#: Longest configuration file read, in bytes: a wrong path may name a disk image or a log.
MAX_FILE_BYTES = 1 << 20


class Override(NamedTuple):
    """One value from the environment or the command line. `key` is dotted; `source` is shown in errors."""

    key: str
    text: str
    source: str


@dataclass(frozen=True)
class Loaded:
    """A checked configuration, and the source of each dotted key that is not a default."""

    config: Config
    origins: dict[str, str] = field(default_factory=dict)
    #: The dotted keys that were chosen for this start: all with an origin but those that are remembered.
    chosen: frozenset[str] = frozenset()
    #: Those of them that stood on the command line.
    on_command_line: frozenset[str] = frozenset()


class SettingError(NamedTuple):
    """One unusable setting: its source, what is wrong, what to do."""

    where: str
    what: str
    do: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what


def load(
    path: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Iterable[Override] = (),
    *,
    remembered: Callable[[Config, Container[str]], Iterable[Override]] = lambda _config, _chosen: (),
) -> Loaded:
    """Read, merge, convert and check. Raises `UserError` (exit code 4) that lists everything found wrong.

    `remembered` returns, given the configuration so far and the keys that something has set, values that override only
    defaults: those that an earlier start left in the state directory.
    """
    draft = _Draft()
    if path is not None:
        draft.merge_file(path, _read(path))
    overrides = list(overrides)
    for override in [*_from_environment(environment or {}), *overrides]:
        draft.merge(override)
    config = draft.config()
    chosen = frozenset(draft.origins)
    if not draft.errors:
        for override in remembered(config, chosen):
            if override.key not in draft.origins:
                draft.merge(override)
        config = draft.config()
    complaints = draft.errors or [SettingError("", *problem) for problem in check(config)]
    if complaints:
        raise _refusal(complaints)
    flags = frozenset(".".join(given.key.split(".")[:2]) for given in overrides)
    return Loaded(config, draft.origins, chosen, flags)


#: The hint if there is no better one.
_SEE_DEFAULTS = "`p2pnode config default` shows every setting"


def _refusal(complaints: list[SettingError]) -> UserError:
    if len(complaints) == 1:
        return UserError(str(complaints[0]), complaints[0].do or _SEE_DEFAULTS, ExitCode.CONFIGURATION)
    listed = "".join(f"\n  {entry}{f' ({entry.do})' if entry.do else ''}" for entry in complaints)
    return UserError(f"{len(complaints)} settings cannot be used:{listed}", _SEE_DEFAULTS, ExitCode.CONFIGURATION)


class _Draft:
    """Merges values, later ones over earlier ones, and collects their origins and errors."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.errors: list[SettingError] = []

    def merge_file(self, path: Path, text: str) -> None:
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UserError(
                f"{path} is not valid TOML: {error}",
                "texts need quotes and lists need brackets; `p2pnode config default` prints a valid file",
                ExitCode.CONFIGURATION,
            ) from None
        for section, table in document.items():
            if section not in SECTIONS:
                self.errors.append(_unknown_section(_place(path, text, section), section))
            elif not isinstance(table, dict):
                what = f"{section} is a section: write [{section}] and its settings below"
                self.errors.append(SettingError(_place(path, text, section), what))
            else:
                for name, value in table.items():
                    self._set(section, name, value, _place(path, text, section, name))

    def merge(self, override: Override) -> None:
        """Merge a value in text form; a key of three or more parts sets an entry of a table (training.options)."""
        section, _, rest = override.key.partition(".")
        name, _, below = rest.partition(".")
        key = f"{section}.{name}"
        if section not in SECTIONS:
            self.errors.append(_unknown_section(override.source, section))
        elif key not in KEYS:
            self.errors.append(_unknown_key(override.source, section, name))
        elif not below:
            self._set(section, name, parsed(override.text, KEYS[key].type), override.source)
        elif isinstance(kind_of(KEYS[key].type), msgspec.inspect.DictType):
            entry = parsed(override.text, Any)
            self._set(section, name, _with_entry(self.values.get(key), below.split("."), entry), override.source)
        else:
            self.errors.append(SettingError(override.source, f"{key} has no settings below it"))

    def config(self) -> Config:
        """The configuration so far; a value that cannot be converted becomes an error and its default is used."""
        sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
        for key, value in self.values.items():
            section, name = key.split(".")
            try:
                sections[section][name] = converted(key, value, KEYS[key].type)
            except InvalidValue as rejected:
                self.errors.append(SettingError(self.origins[key], str(rejected)))
        return Config(**{name: SECTIONS[name](**given) for name, given in sections.items()})  # type: ignore[arg-type]

    def _set(self, section: str, name: str, value: Any, origin: str) -> None:
        key = f"{section}.{name}"
        if key in KEYS:
            self.values[key] = value
            self.origins[key] = origin
        else:
            self.errors.append(_unknown_key(origin, section, name))


def _with_entry(table: Any, path: list[str], value: Any) -> dict[str, Any]:
    """A copy of a table with one nested entry set; anything but a table is replaced by one."""
    copy = dict(table) if isinstance(table, dict) else {}
    copy[path[0]] = value if len(path) == 1 else _with_entry(copy.get(path[0]), path[1:], value)
    return copy


def _read(path: Path) -> str:
    try:
        if not path.is_dir() and path.stat().st_size > MAX_FILE_BYTES:
            what = f"{path} is larger than {MAX_FILE_BYTES} bytes: this is not a node.toml"
            raise UserError(what, "give the right file with --config", ExitCode.CONFIGURATION)
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        hint = f"create one with `p2pnode init {path}`, or leave --config out to use the defaults"
        raise UserError(f"there is no configuration file {path}", hint, ExitCode.CONFIGURATION) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        what = f"cannot read the configuration file {path}: {reason}"
        raise UserError(what, "check the path and its permissions", ExitCode.CONFIGURATION) from None


def _place(path: Path, text: str, section: str, name: str = "") -> str:
    """`node.toml line 7`, or only the file if the line is unknown (inline tables, dotted keys).

    tomllib keeps no positions, so the lines are searched again. Used in messages only.
    """
    current: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+([^\[\]]+)\]", line):
            current = [part.strip(" \"'") for part in header[1].split(".")]
            if current[:2] in ([section, name], [section] if not name else []):
                return f"{path} line {number}"
        elif assigned := re.match(r"\s*([\w\"'-]+)\s*[=.]", line):
            key = assigned[1].strip("\"'")
            if (current == [section] and key == name) or (not current and not name and key == section):
                return f"{path} line {number}"
    return str(path)


def _from_environment(environment: Mapping[str, str]) -> list[Override]:
    """The settings among the variables. Names without a double underscore are not settings."""
    found = []
    for variable in sorted(environment):
        section, separator, key = variable.removeprefix(ENVIRONMENT_PREFIX).partition("__")
        if variable.startswith(ENVIRONMENT_PREFIX) and separator:
            dotted = f"{section}.{key}".lower().replace("__", ".")
            found.append(Override(dotted, environment[variable], f"environment variable {variable}"))
    return found


def _unknown_section(where: str, section: str) -> SettingError:
    owners = [name for name in SECTIONS if section in keys_of(name)]
    if owners:
        return SettingError(where, f"{section} is outside its section", f"write it under [{owners[0]}]")
    close = nearest(section, list(SECTIONS))
    do = f"did you mean [{close}]?" if close else f"the sections are {', '.join(SECTIONS)}"
    return SettingError(where, f"there is no section [{section}]", do)


def _unknown_key(where: str, section: str, name: str) -> SettingError:
    what = f"there is no setting {section}.{name}"
    if not name:
        return SettingError(where, f"{section} is a section, not a setting", f"it has {', '.join(keys_of(section))}")
    if close := nearest(name, keys_of(section)):
        return SettingError(where, what, f"did you mean {section}.{close}?")
    elsewhere = [key for key in KEYS if key.endswith(f".{name}")]
    if elsewhere or (close := nearest(f"{section}.{name}", list(KEYS), cutoff=0.7)):
        return SettingError(where, what, f"did you mean {elsewhere[0] if elsewhere else close}?")
    return SettingError(where, what, f"[{section}] has {', '.join(keys_of(section))}")
