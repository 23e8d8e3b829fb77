"""Decodes a large message in pieces, between which other tasks run. Pure.

msgspec decodes a message as a whole, and keeps the interpreter meanwhile: half a second for 16 MB of identities, on the
event loop or in a thread. Here the outline of a message is read first: lists stay bytes (`msgspec.Raw`), which
takes about 3 ns a byte. Then each list is cut into its elements, and some elements at a time are decoded. The result,
and what is refused, are those of `training.exchange.messages.decode`, but for a bound on all elements together.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Protocol, TypeVar, Union, cast, get_args, get_origin

import msgspec
from msgspec import Meta, Raw

S = TypeVar("S")
#: Decoding so many bytes takes up to 0.8 ms: at worst 50 ns a byte, with the garbage collection of what is made.
PIECE_BYTES = 1 << 14
#: A list that cannot have more elements than this is decoded as a whole with what surrounds it.
SHORT_LENGTH = 64
#: Of a message, the pieces of a list are found 20 times as fast as they are decoded.
SCANNED_PER_DECODED = 16

#: Elements of the long lists of one message, and of the lists in those: each is an object that the garbage collection
#: of the interpreter looks at, twenty million in a second.
MAX_ELEMENTS = 1 << 19

#: Called before so many bytes are decoded; returns when other tasks have had their turn.
Pause = Callable[[int], Awaitable[None]]
Piece = bytes | Raw


class _Reading:
    """The decoding of one message."""

    def __init__(self, pause: Pause) -> None:
        self.pause = pause
        self._left = MAX_ELEMENTS

    def count(self, elements: int) -> None:
        """So many elements were decoded. Raises `msgspec.DecodeError` if there are too many."""
        self._left -= elements
        if self._left < 0:
            raise msgspec.DecodeError(f"its lists have more than {MAX_ELEMENTS} elements")


class _Plan(Protocol):
    """How values of one type are decoded."""

    async def read(self, piece: Piece, reading: _Reading) -> Any:
        """Raises `msgspec.DecodeError` or `RecursionError`."""
        ...


class _Whole:
    """A value without long lists, which is decoded at once."""

    def __init__(self, kind: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode

    async def read(self, piece: Piece, reading: _Reading) -> Any:
        await reading.pause(_size(piece))
        return self._decode(piece)


class _List:
    """A list; `kind` is its type with the limits of its length."""

    def __init__(self, kind: Any, item: Any) -> None:
        limits = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
        self._split = msgspec.msgpack.Decoder(Annotated[list[Raw], *limits] if limits else list[Raw]).decode
        self._item, self._has_long_items = _plan_of(item), _is_long(item)
        #: Where in each element, a tuple, a short list is.
        self._inner = _place_of_list(item)
        self._decode_item = msgspec.msgpack.Decoder(item).decode
        self._decode = msgspec.msgpack.Decoder(kind).decode

    async def read(self, piece: Piece, reading: _Reading) -> list[Any]:
        if (size := _size(piece)) <= PIECE_BYTES:
            await reading.pause(size)
            whole = cast(list[Any], self._decode(piece))
            self._count(whole, reading)
            return whole
        await reading.pause(size // SCANNED_PER_DECODED)
        parts, found, ready, ready_bytes = self._split(piece), list[Any](), list[Raw](), 0
        parts.reverse()
        while parts:
            part = parts.pop()  # its memory is freed with it
            size = _size(part)
            if self._has_long_items and size > PIECE_BYTES:
                await self._take(ready, ready_bytes, found, reading)
                ready_bytes = 0
                found.append(await self._item.read(part, reading))
                continue
            ready.append(part)
            ready_bytes += size
            if ready_bytes >= PIECE_BYTES:
                await self._take(ready, ready_bytes, found, reading)
                ready_bytes = 0
        await self._take(ready, ready_bytes, found, reading)
        return found

    async def _take(self, ready: list[Raw], ready_bytes: int, found: list[Any], reading: _Reading) -> None:
        if ready:
            await reading.pause(ready_bytes)
            made = [self._decode_item(part) for part in ready]
            self._count(made, reading)
            found += made
            ready.clear()

    def _count(self, made: list[Any], reading: _Reading) -> None:
        inner, more = self._inner, 0
        if inner is not None:
            more = sum([len(one[inner]) for one in made])
        reading.count(len(made) + more)


class _Tuple:
    """A tuple of so many values, of which some have long lists."""

    def __init__(self, items: tuple[Any, ...]) -> None:
        self._split = msgspec.msgpack.Decoder(tuple[(Raw,) * len(items)]).decode  # type: ignore[misc]
        self._items = [_plan_of(item) for item in items]

    async def read(self, piece: Piece, reading: _Reading) -> tuple[Any, ...]:
        await reading.pause(_size(piece) // SCANNED_PER_DECODED)
        parts = cast(tuple[Raw, ...], self._split(piece))
        return tuple([await plan.read(part, reading) for plan, part in zip(self._items, parts, strict=True)])


class _Optional:
    """None, or a value with long lists."""

    def __init__(self, kind: Any) -> None:
        self._plan = _plan_of(kind)

    async def read(self, piece: Piece, reading: _Reading) -> Any:
        return None if bytes(memoryview(piece)[:1]) == b"\xc0" else await self._plan.read(piece, reading)


class _Struct:
    """A message, or a part of one, with long lists."""

    def __init__(self, kind: type[msgspec.Struct]) -> None:
        self._kind = kind
        self._long: dict[str, _Plan] = {}
        outline: list[tuple[str, Any] | tuple[str, Any, Any]] = []
        for field in msgspec.structs.fields(kind):
            shown = field.type
            if _is_long(field.type):
                self._long[field.name], shown = _plan_of(field.type), Raw
            if field.required:
                outline.append((field.name, shown))
            elif shown is Raw:
                outline.append((field.name, Raw, Raw()))
            elif field.default is not msgspec.NODEFAULT:
                outline.append((field.name, shown, field.default))
            else:
                outline.append((field.name, shown, msgspec.field(default_factory=field.default_factory)))
        forbid = kind.__struct_config__.forbid_unknown_fields
        made = msgspec.defstruct(f"{kind.__name__}Outline", outline, array_like=True, forbid_unknown_fields=forbid)
        self._split = msgspec.msgpack.Decoder(made).decode

    async def read(self, piece: Piece, reading: _Reading) -> msgspec.Struct:
        await reading.pause(_size(piece) // SCANNED_PER_DECODED)
        values = msgspec.structs.asdict(self._split(piece))
        for name, plan in self._long.items():
            if _size(values[name]):
                values[name] = await plan.read(values[name], reading)
            else:
                del values[name]  # not sent: it has its default
        return self._kind(**values)


def _size(piece: Piece) -> int:
    return memoryview(piece).nbytes


def _without_limits(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _is_long(kind: Any) -> bool:
    """Whether values of a type may be larger than a piece, because they have lists."""
    limits = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    plain = _without_limits(kind)
    if isinstance(plain, type) and issubclass(plain, msgspec.Struct):
        return any(_is_long(field.type) for field in msgspec.structs.fields(plain))
    arguments = get_args(plain)
    if get_origin(plain) is list:
        lengths = [limit.max_length for limit in limits if isinstance(limit, Meta) and limit.max_length is not None]
        return min(lengths, default=SHORT_LENGTH + 1) > SHORT_LENGTH or _is_long(arguments[0])
    return any(_is_long(one) for one in arguments if one is not Ellipsis)


def _place_of_list(kind: Any) -> int | None:
    plain = _without_limits(kind)
    if get_origin(plain) is not tuple or _is_long(kind):
        return None
    lists = [place for place, one in enumerate(get_args(plain)) if get_origin(_without_limits(one)) is list]
    return lists[0] if lists else None


@lru_cache(maxsize=256)
def _plan_of(kind: Any) -> _Plan:
    if not _is_long(kind):
        return _Whole(kind)
    plain = _without_limits(kind)
    arguments = get_args(plain)
    if isinstance(plain, type) and issubclass(plain, msgspec.Struct):
        return _Struct(plain)
    if get_origin(plain) is list:
        return _List(kind, arguments[0])
    if get_origin(plain) is tuple and Ellipsis not in arguments:
        return _Tuple(arguments)
    others = [one for one in arguments if one is not NoneType]
    if get_origin(plain) in (Union, UnionType) and len(others) == 1 < len(arguments):
        return _Optional(others[0])
    return _Whole(kind)


async def decode_in_pieces(payload: bytes, kind: type[S], pause: Pause) -> S:
    """The message, as `training.exchange.messages.decode` gives it. Raises `msgspec.DecodeError`.

    `pause` is awaited before each piece, with the number of bytes whose decoding takes as long.
    """
    try:
        return cast(S, await _plan_of(cast(Any, kind)).read(payload, _Reading(pause)))
    except (UnicodeDecodeError, RecursionError) as error:  # as in `messages.decode`
        raise msgspec.DecodeError(f"{error}") from error
