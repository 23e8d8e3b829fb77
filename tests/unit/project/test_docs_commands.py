"""The commands that the documents show are commands of this version: `p2pnode` ones parse, `make` targets exist.

Nothing is run. Read are the fenced shell blocks of the Markdown files, and the comments at the top of deploy's files.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import typer

from tests.harness.project.documents import shell_lines
from tests.harness.project.repository import ROOT

DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "deploy" / "README.md",
    *sorted(ROOT.glob("docs/*.md")),
)
OPERATORS = set("();<>|&")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
#: In deploy's files: `#   … p2pnode status   (what it does)`, whatever starts it; also ExecStart.
DEPLOYED = re.compile(r"^(?:#   .*[ /]|ExecStart=/\S*/)p2pnode (?!p2pnode)([a-z].*?)(?: {2,}.*)?$", re.MULTILINE)


class Command(NamedTuple):
    place: str
    words: list[str]

    def __str__(self) -> str:
        return f"{self.place}: {shlex.join(self.words)}"


def simple_commands(line: str) -> Iterator[list[str]]:
    """The commands of a shell line, cut at its operators; leading assignments and what follows a redirection go."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    redirected = False
    for word in [*lexer, ";"]:
        if set(word) <= OPERATORS:
            if words and not redirected:
                yield words
            words, redirected = [], set(word) <= set("<>")
        elif words or not ASSIGNMENT.match(word):
            words.append(word)


def shown_commands() -> list[Command]:
    found = []
    for path in DOCUMENTS:
        if path.exists():
            for line in shell_lines(path.read_text(encoding="utf-8")):
                # Blocks without prompts may show output too, which need not be a shell's language.
                if re.search(r"\b(p2pnode|make)\b", line):
                    found += [Command(path.relative_to(ROOT).as_posix(), words) for words in simple_commands(line)]
    for path in sorted(path for path in (ROOT / "deploy").rglob("*") if path.is_file()):
        for rest in DEPLOYED.findall(path.read_text(encoding="utf-8")):
            found += [
                Command(path.relative_to(ROOT).as_posix(), words)
                for words in list(simple_commands(f"p2pnode {rest}"))[:1]
            ]
    return found


def complaint_about(arguments: list[str]) -> str:
    """The command line's error for these arguments of `p2pnode`; empty where it accepts them."""
    from p2pnode.cli import app

    command: Any = typer.main.get_command(app)
    rest = list(arguments)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        if name not in command.commands:
            return f"there is no command {name!r}"
        command = command.commands[name]
    try:
        command.make_context(command.name, [word for word in rest if word != "--debug"])
    except typer.TyperException as error:
        return error.format_message()
    except typer.Exit:
        return ""  # --help and --version are carried out while parsing
    return ""


def commands_called(name: str) -> list[Command]:
    return [command for command in shown_commands() if command.words[0].rpartition("/")[2] == name]


def test_shown_p2pnode_commands_parse() -> None:
    """The command line knows each command and each of its options, and their values have the right form."""
    shown = commands_called("p2pnode")
    complaints = {str(command): complaint_about(command.words[1:]) for command in shown}

    assert {command: complaint for command, complaint in complaints.items() if complaint} == {}
    assert len(shown) > 20


def test_shown_make_targets_exist() -> None:
    """The Makefile has each target; arguments handed through to `p2pnode demo` parse as well."""
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert phony is not None
    for command in commands_called("make"):
        targets = [word for word in command.words[1:] if not ASSIGNMENT.match(word)]
        arguments = [word.removeprefix("ARGS=") for word in command.words if word.startswith("ARGS=")]

        assert set(targets) <= set(phony[1].split()), command
        if targets == ["demo"] and arguments:
            assert complaint_about(["demo", *shlex.split(arguments[0])]) == "", command


@pytest.mark.parametrize("arguments", [["no-such-command"], ["start", "--no-such-flag"], ["config", "no-such-command"]])
def test_a_wrong_command_is_noticed(arguments: list[str]) -> None:
    """The check itself is not vacuous: unknown commands and flags are refused."""
    assert complaint_about(arguments) != ""


def test_shell_lines_are_read_as_a_shell_would() -> None:
    """Prompts, assignments, comments, continued lines, pipes and redirections leave the bare commands."""
    text = (
        "```console\n$ A=1 p2pnode start \\\n    --config x.toml  # why\nsome output\n$ p2pnode peers | head > y\n```\n"
    )

    commands = [words for line in shell_lines(text) for words in simple_commands(line)]

    assert commands == [["p2pnode", "start", "--config", "x.toml"], ["p2pnode", "peers"], ["head"]]


def test_every_test_that_a_document_names_exists() -> None:
    """A name in backticks that begins with test_ is a test or a test file; one that ends in an ellipsis, its start."""
    tests = "\n".join(path.stem + "\n" + path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/test_*.py"))
    named = {
        (path.name, name)
        for path in DOCUMENTS
        for name in re.findall(r"`(test_\w+)[….\[`]", path.read_text(encoding="utf-8"))
    }
    missing = [f"{document}: {name}" for document, name in sorted(named) if name not in tests]

    assert named
    assert missing == []


def test_every_module_that_a_document_names_exists() -> None:
    """A path of this repository in backticks is a file or a folder of it."""
    roots = ("overlay", "training", "p2pnode", "tests", "benchmarks", "deploy", "docs")
    named = {
        (path.name, name)
        for path in [*DOCUMENTS, ROOT / "SECURITY.md"]
        for name in re.findall(rf"`((?:{'|'.join(roots)})/[\w./-]+)`", path.read_text(encoding="utf-8"))
    }
    missing = [f"{document}: {name}" for document, name in sorted(named) if not (ROOT / name).exists()]

    assert named
    assert missing == []
