"""Lines for a terminal: cut, wrapped, aligned, coloured, or plain ASCII; whole ones for a pipe."""

from __future__ import annotations

import io
import random
import sys

import pytest

from p2pnode.commands.output import print_error, print_notice
from p2pnode.terminal.lines import Column, Span, Style, cells, clipped, columns, labelled, prefix, table, wrapped

NARROW, PIPE = Style(width=20), Style()


def test_a_line_is_cut_to_the_width_of_the_terminal_alone() -> None:
    """An ellipsis marks what is left out, also across spans; a pipe gets all."""
    line: list[Span] = [("abcdefghij", ""), ("klmnopqrstuvwxyz", "bad")]
    assert NARROW.render(line) == "abcdefghijklmnopqrs…"
    assert PIPE.render(line) == "abcdefghijklmnopqrstuvwxyz"


def test_wide_characters_count_as_two_cells() -> None:
    """A name in Chinese takes two cells per character, a combining accent none."""
    assert (cells("节点"), cells("é"), cells("e\u0301")) == (4, 1, 1)
    assert prefix("节点a", 3) == "节"
    assert cells(Style(width=10).render([("节点" * 20, "")])) <= 10


def test_control_characters_of_peers_never_reach_the_terminal() -> None:
    """Escape sequences, line ends, bidirectional marks and lone surrogates become question marks."""
    for style in (PIPE, NARROW, Style(colour=True), Style(encoding="ascii")):
        text = style.render([("\x1b]0;x\x07a\nb\r\u202ec\ud800", "")])
        assert text == "?]0;x?a?b??c?"


def test_colours_are_there_only_where_wanted() -> None:
    """One colour per tone, reset after each span; none without `colour`, and none around blanks."""
    line: list[Span] = [("ok", "ok"), ("  ", "bad"), ("no", "bad")]
    assert Style(colour=True).render(line) == "\x1b[32mok\x1b[0m  \x1b[31mno\x1b[0m"
    assert PIPE.render(line) == "ok  no"


def test_a_terminal_without_unicode_gets_ascii_of_the_same_width() -> None:
    """Blocks and marks have a replacement of one character; what has none becomes a question mark."""
    line: list[Span] = [("● ▁▂▃█░ … é", "")]
    for encoding in ("ascii", "ANSI_X3.4-1968", "no such encoding"):
        text = Style(encoding=encoding).render(line)
        assert text.isascii()
        assert text == "* _.-#. ~ ?"
    assert Style(encoding="latin-1").render([("é", "")]) == "é"
    assert Style(width=10, encoding="ascii").render([("a" * 11, "")]) == "a" * 9 + "~"


def test_text_is_wrapped_at_spaces_and_where_it_must() -> None:
    """No line is wider than allowed, nothing but spaces is lost, and empty text is one empty line."""
    assert wrapped("one two three", 8) == ["one two", "three"]
    assert wrapped("a " + "x" * 20, 8) == ["a", "xxxxxxxx", "xxxxxxxx", "xxxx"]
    assert wrapped("", 8) == [""]
    rng = random.Random(7)
    for _ in range(200):
        text = " ".join("w" * rng.randint(1, 30) for _ in range(rng.randint(1, 12)))
        width = rng.randint(10, 40)
        lines = wrapped(text, width)
        assert all(0 < cells(line) <= width for line in lines), (text, width)
        assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_further_lines_of_a_label_are_indented() -> None:
    """The label stands once, and its text in a column beside it."""
    lines = [NARROW.render(line) for line in labelled("health", "one two three", NARROW)]
    assert lines == ["health     one two", "           three"]
    assert [PIPE.render(line) for line in labelled("a", "b " * 100, PIPE)] == ["a          " + ("b " * 100).rstrip()]


def test_a_table_narrows_columns_and_then_leaves_them_out() -> None:
    """It fits every width; the column to keep longest is there to the end."""
    heads = [Column("id"), Column("address", keep=1, least=6), Column("step", right=True, keep=2)]
    rows: list[list[Span]] = [[("abcd", ""), ("10.0.0.1:8468", ""), ("7", "")]]

    def at(width: int | None) -> list[str]:
        style = Style(width=width)
        return [style.render(line) for line in table(heads, rows, style)]

    assert at(None) == ["id    address        step", "abcd  10.0.0.1:8468     7"]
    assert at(20) == ["id    address   step", "abcd  10.0.0.…     7"]
    assert at(12) == ["id    step", "abcd     7"]
    assert at(3) == ["id    step", "abcd     7"]
    for width in range(10, 60):
        assert all(cells(line) <= width for line in at(width))


def test_columns_of_text_are_as_wide_as_their_widest_cell() -> None:
    """Without trailing spaces, for grep and awk."""
    assert columns(("a", "bb"), [("ccc", "d")]) == "a    bb\nccc  d"
    assert clipped("abc", 2) == "a…"


class Terminal(io.StringIO):
    """A terminal of 80 cells."""

    def isatty(self) -> bool:
        return True


LONG = "keys, tokens and invitations are removed; addresses of peers, paths and what your script prints are in it"


def test_words_for_people_are_broken_at_spaces_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the end of the label, and without what could move the cursor."""
    errors = Terminal()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", errors)
    print_notice(LONG)
    print_error("no \x1b[2J", f"{LONG}\nand more")
    assert errors.getvalue().splitlines() == [
        "note: keys, tokens and invitations are removed; addresses of peers, paths and",
        "      what your script prints are in it",
        "error: no ?[2J",
        "hint: keys, tokens and invitations are removed; addresses of peers, paths and",
        "      what your script prints are in it",
        "      and more",
    ]


def test_a_pipe_gets_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Programs look for what they know in one line."""
    print_error(LONG, LONG)
    print_error("interrupted", "")
    print_notice(LONG)
    found = capsys.readouterr()
    assert found.err == f"error: {LONG}\nhint: {LONG}\nerror: interrupted\nnote: {LONG}\n"
