"""Writes a configuration as TOML: as it is, or as a file to start from. Pure."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import Any

from p2pnode.config.settings import KEYS, SECTIONS, Config, keys_of
from p2pnode.config.values import description_of

_TEMPLATE_HEAD = """\
# Each line shows a default; without its "# " it counts. docs/config.md and `p2pnode config default` have every setting.
# Environment variables override this file (P2PNODE_NODE__PORT=8469), flags override both (--set node.port=8469).
"""

#: The settings that most people change, in `node.toml`.
WHAT_MATTERS = (
    "node.host",
    "node.port",
    "swarm.run",
    "swarm.bootstrap",
    "swarm.key_file",
    "training.task",
    "training.data_dir",
    "training.local_steps",
    "training.device",
    "training.max_steps",
    "barrier.method",
    "exchange.codec",
)


def node_toml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """A configuration as TOML that `load` reads back equal. `origins` adds where each value came from."""
    parts = []
    for section in SECTIONS:
        lines = [f"[{section}]"]
        for name in keys_of(section):
            value = getattr(getattr(config, section), name)
            origin = "" if origins is None else f"  # {origins.get(f'{section}.{name}', 'default')}"
            # TOML requires tables at the end of a section; the settings structs declare them last.
            lines.append((f"[{section}.{name}]" if isinstance(value, dict) else f"{name} = {toml(value)}") + origin)
            if isinstance(value, dict):
                lines.extend(f"{_bare(key)} = {toml(entry)}" for key, entry in value.items())
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def template(keys: Container[str] = WHAT_MATTERS) -> str:
    """A file to start from: these settings, each explained and with its default in a comment. It changes nothing where
    it is read as it is."""
    parts, defaults = [_TEMPLATE_HEAD], Config()
    for section in SECTIONS:
        lines = [f"# {summary_of(section)}", f"[{section}]"]
        for name in keys_of(section):
            if (key := f"{section}.{name}") in keys:
                default = toml(getattr(getattr(defaults, section), name))
                lines += ["", f"# {description_of(KEYS[key].type)}", f"# {name} = {default}"]
        if len(lines) > 2:
            parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def summary_of(section: str) -> str:
    """The first line of a section's docstring."""
    return (SECTIONS[section].__doc__ or "").strip().splitlines()[0]


def toml(value: Any) -> str:
    """One value as TOML. Raises `TypeError` for values without a TOML form, such as None."""
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str():
            # JSON escapes like TOML, except DEL, which TOML requires to be escaped too.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return "[" + ", ".join(toml(entry) for entry in value) + "]"
        case dict():
            return "{" + ", ".join(f"{_bare(key)} = {toml(entry)}" for key, entry in value.items()) + "}"
        case _:
            raise TypeError(f"TOML has no form for {value!r}")


def _bare(key: str) -> str:
    plain = key.isascii() and key.replace("_", "a").replace("-", "a").isalnum()
    return key if plain else toml(key)
