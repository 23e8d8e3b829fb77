"""Converts the value of one setting: text to a value, a value to its type, and a type to a description in words.

Pure. It knows no particular setting; `p2pnode.config.load` does.
"""

from __future__ import annotations

import difflib
import math
import tomllib
import typing
from typing import Any

import msgspec
from msgspec import inspect

from p2pnode.errors import P2PNodeError


class InvalidValue(P2PNodeError):
    """The value is not allowed for its key; the text names the key, the value and what is allowed."""


def kind_of(annotation: Any) -> inspect.Type:
    """msgspec's description of a type, without the wrapper for its metadata."""
    kind = inspect.type_info(annotation)
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    return kind


def description_of(annotation: Any) -> str:
    """The explanation in the `Meta` of a setting."""
    kind = inspect.type_info(annotation)
    schema = kind.extra_json_schema if isinstance(kind, inspect.Metadata) else None
    return str((schema or {}).get("description", ""))


def parsed(text: str, annotation: Any) -> Any:
    """Text of a flag or a variable as a TOML value; plain text if it is not TOML or the setting is a text."""
    kind = kind_of(annotation)
    try:
        document = tomllib.loads(f"value = {text}")
        value = document["value"] if len(document) == 1 else text
    except tomllib.TOMLDecodeError:
        value = text
    if isinstance(kind, inspect.StrType | inspect.LiteralType) and not isinstance(value, str):
        return text  # --run 2024 is the name "2024"
    if isinstance(kind, inspect.ListType) and not isinstance(value, list):
        return [part.strip() for part in text.split(",") if part.strip()]
    return value


def converted(key: str, value: Any, annotation: Any) -> Any:
    """The value, converted to the type of its key and in its range. Raises `InvalidValue`."""
    try:
        result = msgspec.convert(value, annotation)
    except msgspec.ValidationError:
        sentence = f"{key} = {shown(value)} is not allowed; it must be {allowed(annotation)}"
        raise InvalidValue(sentence + _closest_choice(value, annotation)) from None
    if isinstance(result, float) and not math.isfinite(result):
        raise InvalidValue(f"{key} = {shown(value)} is not allowed; it must be a finite number")
    return result


def shown(value: Any) -> str:
    """A value as the user may have written it, cut to 80 characters."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, str):
        text = f'"{value}"'
    return text if len(text) <= 80 else text[:77] + "…"


def nearest(name: str, names: list[str], cutoff: float = 0.5) -> str | None:
    """The name most similar to a misspelt one, or None."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return close[0] if close else None


def choices(annotation: Any) -> list[str]:
    """The allowed words of a choice, as declared; empty for any other type."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) is typing.Literal:
        return [str(word) for word in typing.get_args(annotation)]
    return []


def allowed(annotation: Any) -> str:
    """What is allowed for a setting of this type: "an integer from 0 to 65535"."""
    if words := choices(annotation):
        return "one of " + ", ".join(words)
    match kind_of(annotation):
        case inspect.IntType() as kind:
            return "an integer" + _range(kind)
        case inspect.FloatType() as kind:
            return "a number" + _range(kind)
        case inspect.BoolType():
            return "true or false"
        case inspect.ListType() as kind:
            return "a list of texts" + (f" (at most {kind.max_length})" if kind.max_length else "")
        case inspect.DictType():
            return "a table"
        case inspect.UnionType():
            return "a text or a list of texts"
        case inspect.StrType(min_length=None, max_length=None):
            return "a text"
        case inspect.StrType() as kind:
            return f"a text of {kind.min_length or 0} to {kind.max_length or 'any number of'} characters"
        case other:
            raise TypeError(f"no description for settings of type {other!r}")


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" from {kind.ge} to {kind.le}"
    bounds = [
        ("at least", kind.ge),
        ("greater than", kind.gt),
        ("at most", kind.le),
        ("less than", kind.lt),
    ]
    words = [f"{word} {bound}" for word, bound in bounds if bound is not None]
    return ", " + " and ".join(words) if words else ""


def _closest_choice(value: Any, annotation: Any) -> str:
    close = nearest(value, choices(annotation)) if isinstance(value, str) else None
    return f" (did you mean {close}?)" if close else ""
