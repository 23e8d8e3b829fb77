"""Values of settings: text to values, values to types, types to words."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta

from p2pnode.config.values import InvalidValue, allowed, choices, converted, nearest, parsed, shown

Percent = Annotated[int, Meta(ge=0, le=100)]
Word = Literal["off", "auto"]


@pytest.mark.parametrize(
    ("text", "annotation", "value"),
    [
        ("7", int, 7),
        ("7", str, "7"),
        ("[1, 2]", list[str], [1, 2]),
        ("a, b", list[str], ["a", "b"]),
        ("auto", Word, "auto"),
        ("not toml", Any, "not toml"),
        ("1\nother = 2", int, "1\nother = 2"),
    ],
)
def test_text_becomes_a_value(text: str, annotation: Any, value: object) -> None:
    """Text is read as TOML, unless the setting is a text or the text is more than one value."""
    assert parsed(text, annotation) == value


def test_a_value_outside_its_type_is_refused_with_what_is_allowed() -> None:
    """The message has key, value, range, and the nearest word of a choice."""
    assert converted("a.b", 100, Percent) == 100
    with pytest.raises(InvalidValue, match=r"a\.b = 101 is not allowed; it must be an integer from 0 to 100"):
        converted("a.b", 101, Percent)
    with pytest.raises(InvalidValue, match=r"one of off, auto \(did you mean auto\?\)"):
        converted("a.b", "aut", Word)
    with pytest.raises(InvalidValue, match="a finite number"):
        converted("a.b", float("nan"), float)


def test_long_values_are_cut_and_texts_quoted() -> None:
    """A value in a message has at most 80 characters."""
    assert (shown(True), shown("x"), shown([1])) == ("true", '"x"', "[1]")
    assert len(shown("x" * 500)) == 78


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (Word, "one of off, auto"),
        (Annotated[float, Meta(gt=0)], "a number, greater than 0"),
        (Annotated[list[str], Meta(max_length=3)], "a list of texts (at most 3)"),
        (Annotated[str, Meta(min_length=1, max_length=64)], "a text of 1 to 64 characters"),
        (list[Word], "a list of auto, off"),
        (dict[str, int], "a table"),
        (bool, "true or false"),
    ],
)
def test_a_type_is_described_in_words(annotation: Any, words: str) -> None:
    """Each kind of setting has a description for messages and docs/config.md."""
    assert allowed(annotation) == words


def test_the_nearest_name_and_the_choices() -> None:
    """A misspelt name finds its neighbour, a different one none; only a choice has choices."""
    assert nearest("prot", ["host", "port"]) == "port"
    assert nearest("xyzzy", ["host", "port"]) is None
    assert choices(Annotated[Word, Meta(description="x")]) == ["off", "auto"]
    assert choices(int) == []
