"""Generates `node.toml` and docs/config.md from the settings, and writes a configuration back as TOML.

`python -m p2pnode.config.documentation` rewrites both files at the root of the repository; a test keeps them equal to
the code. Apart from that command every function is pure.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import msgspec

from p2pnode.config.load import ENVIRONMENT_PREFIX
from p2pnode.config.settings import KEYS, SECTIONS, Config, keys_of
from p2pnode.config.values import allowed, description_of
from p2pnode.errors import LASTING, MEANINGS, SCRIPTS_OWN, ExitCode

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

_PAGE_HEAD = """\
# Configuration

Generated from the code by `python -m p2pnode.config.documentation`; a test keeps it equal. Do not edit it by hand.

A value is taken from the first of these sources that contains it:

1. a flag of the command line: `--port 8469`, or for any key `--set node.port=8469`;
2. an environment variable `P2PNODE_SECTION__KEY`: `P2PNODE_NODE__PORT=8469`,
   `P2PNODE_TRAINING__OPTIONS__PART=2` for an entry of a table;
3. the file given with `--config`, or else `node.toml` in the working directory;
4. the state directory, which keeps what earlier starts were told;
5. the default.

Values of flags and variables are read as TOML (`true`, `0.5`, `["a:8468", "b:8468"]`). Anything that is not a TOML
value is read as plain text, and a list of texts may be written with commas (`a:8468,b:8468`).

`p2pnode config show --origin` prints each value and its source, `p2pnode config check` checks all of them without
starting a node, and `p2pnode init` writes a file to start from, which changes nothing as it is.

A state directory belongs to one run and one model. A start that needs another is refused (exit code 5). Once a node is
in its swarm, the directory keeps in `node.json` what the start was told: every setting of the command line, and, also
from the environment or a file, run, bootstrap, key file, host, port, task and the like. A plain `p2pnode start` then
continues with them. A setting that is given anew replaces the former one. `p2pnode forget` removes all of it.

Without `node.state_dir` each run has its own, `~/.local/state/p2pnode/<run>`. A command that names no run means the
only one there is, or the one whose node runs.

An unknown key, a value outside its range and a combination that cannot work are refused at start with exit code 4.
"""


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


def config_page() -> str:
    """docs/config.md."""
    parts = [_PAGE_HEAD]
    defaults = Config()
    for section in SECTIONS:
        lines = [f"## [{section}]", "", summary_of(section), ""]
        lines += ["| key | default | allowed | meaning |", "|---|---|---|---|"]
        for name in keys_of(section):
            info = KEYS[f"{section}.{name}"]
            default = toml(getattr(getattr(defaults, section), name))
            cells = [f"`{name}`", f"`{default}`", allowed(info.type), description_of(info.type)]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("\n".join(lines) + "\n")
    variable = f"`{ENVIRONMENT_PREFIX}NODE__PORT`"
    parts.append(
        "## Exit codes\n\n"
        f"Every `p2pnode` command ends with one of these. A wrong {variable}, flag or file gives 4; a command line\n"
        "that cannot be parsed gives 2. The service of `deploy/` restarts no node whose cause lasts.\n\n"
        "| code | meaning | restarted |\n|---|---|---|\n"
        + "".join(f"| {int(code)} | {meaning} | {_restarted(code)} |\n" for code, meaning in MEANINGS.items())
        + f"\n{SCRIPTS_OWN}\n"
    )
    return "\n".join(parts)


def _restarted(code: ExitCode) -> str:
    return "no" if code is ExitCode.OK else "no: the cause lasts" if code in LASTING else "yes"


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


def as_json(config: Config) -> dict[str, Any]:
    """The configuration as plain values, by section."""
    plain: dict[str, Any] = msgspec.to_builtins(config)
    return plain


def main() -> None:
    """Rewrite node.toml and docs/config.md of the repository that contains this module."""
    root = Path(__file__).resolve().parent.parent.parent
    (root / "node.toml").write_text(template(), encoding="utf-8")
    (root / "docs").mkdir(exist_ok=True)
    (root / "docs" / "config.md").write_text(config_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
