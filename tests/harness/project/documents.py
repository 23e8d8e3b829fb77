"""What the documents show: their commands and their Python, as a reader would type them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.harness.project.repository import ROOT

FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SHELLS = {"bash", "console", "sh", "shell"}
#: A comment behind a command.
COMMENT = re.compile(r"\s+# .*$")
#: Generated signatures, not programs.
SIGNATURES = "docs/python-api.md"
#: `tests/process/test_tutorial.py` runs this page, in order and on three machines.
TUTORIAL = "docs/tutorial.md"


class Shown(NamedTuple):
    """A command or a block of Python, and the document that shows it."""

    document: str
    text: str

    def __str__(self) -> str:
        first = self.text.split("\n", 1)[0]
        return f"{self.document}: {first[:100]}"


def pages() -> list[str]:
    """The README and the pages of docs/ whose programs are run."""
    found = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
    names = [path.relative_to(ROOT).as_posix() for path in found]
    return [name for name in names if name not in (SIGNATURES, TUTORIAL)]


def shell_lines(text: str) -> Iterator[str]:
    """What a reader would type: the lines behind prompts, or every line of a block without; continued ones joined."""
    for _, language, block in FENCE.findall(text):
        if language in SHELLS:
            lines = [line.strip() for line in block.replace("\\\n", " ").splitlines()]
            prompted = [line[2:] for line in lines if line.startswith("$ ")]
            yield from prompted or [line for line in lines if line and not line.startswith("#")]


def indented_lines(text: str) -> Iterator[str]:
    """Commands in blocks that are indented by four spaces, and not fenced."""
    yield from re.findall(r"^ {4}((?:p2pnode|python|make|curl) .*)$", FENCE.sub("", text), re.MULTILINE)


def commands() -> list[Shown]:
    """The commands of all pages without their comments, in order; one that several pages show is of the first one."""
    found: dict[str, str] = {}
    for page in pages():
        text = _text(ROOT / page)
        for line in (*shell_lines(text), *indented_lines(text)):
            found.setdefault(COMMENT.sub("", line), page)
    return [Shown(page, line) for line, page in found.items()]


def snippets() -> list[Shown]:
    """The blocks of Python of all pages, without their indentation."""
    return [
        Shown(page, re.sub(rf"^{indent}", "", block, flags=re.MULTILINE))
        for page in pages()
        for indent, language, block in FENCE.findall(_text(ROOT / page))
        if language == "python"
    ]


def json_blocks(page: str) -> list[str]:
    """The blocks of JSON of a page."""
    return [block for _, language, block in FENCE.findall(_text(ROOT / page)) if language == "json"]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
