"""docs/config.md: every setting, and every exit code. Pure."""

from __future__ import annotations

from p2pnode.config.load import ENVIRONMENT_PREFIX
from p2pnode.config.settings import KEYS, SECTIONS, Config, keys_of
from p2pnode.config.toml import summary_of, toml
from p2pnode.config.values import allowed, description_of
from p2pnode.errors import LASTING, MEANINGS, SCRIPTS_OWN, ExitCode

_HEAD = """\
# Configuration

Generated from the code by `make generated`; a test keeps it equal. Do not edit it by hand.

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


def config_page() -> str:
    """docs/config.md."""
    parts = [_HEAD]
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
