"""`p2pnode completion`: prints what a shell loads to complete commands, options and their values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from p2pnode.commands.output import print_line
from p2pnode.errors import ExitCode, UserError

#: The program asks itself through this variable, which the script of the shell sets.
VARIABLE = "_P2PNODE_COMPLETE"
#: Each shell, and how its user keeps the script.
SHELLS = {
    "bash": 'eval "$(p2pnode completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(p2pnode completion zsh)" in ~/.zshrc, below compinit',
    "fish": "p2pnode completion fish > ~/.config/fish/completions/p2pnode.fish",
}


def completion(
    shell: Annotated[
        str, typer.Argument(metavar="[bash|zsh|fish]", help="Default: the shell of this user.", show_default=False)
    ] = "",
) -> int:
    """Print the completion script of a shell.

    Example: eval "$(p2pnode completion bash)"
    """
    shell = shell or Path(os.environ.get("SHELL", "")).name
    if shell not in SHELLS:
        raise UserError(
            f'there is no completion for the shell "{shell}"', f"name one of {', '.join(SHELLS)}", ExitCode.USAGE
        )
    from typer import completion as scripts  # only here: it costs every other command 10 ms

    print_line(
        f"# to keep it: {SHELLS[shell]}" if shell != "zsh" else f"#compdef p2pnode\n# to keep it: {SHELLS[shell]}"
    )
    print_line(scripts.get_completion_script(prog_name="p2pnode", complete_var=VARIABLE, shell=shell))  # type: ignore[attr-defined]
    return 0


def prepare() -> None:
    """Let this process answer a shell that completes, if it was asked to."""
    if VARIABLE in os.environ:
        from typer import completion as scripts

        scripts.completion_init()  # type: ignore[attr-defined]
