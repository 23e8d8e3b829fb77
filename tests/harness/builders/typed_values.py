"""Values of any type of a message, generated from its msgspec definition: ordinary, at the bounds, and beyond what is
likely.

`Typed.value` makes a whole value of a type, `Typed.changed` replaces one part of a real one, anywhere in it. Both keep
to the definition, so that everything passes the decoder: what must hold afterwards is up to the handlers. The random
source may be hypothesis's (`st.randoms(use_true_random=False)`), which then shrinks what fails, or a seeded one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import inspect

from p2pnode.training.exchange import messages as steps
from p2pnode.training.exchange import ownership_messages as moves

#: Every request of the exchange: what it carries, and what answers it.
KINDS: dict[str, tuple[type[msgspec.Struct], type[msgspec.Struct]]] = {
    "push": (steps.Push, steps.PushAnswer),
    "pull": (steps.Pull, steps.PullAnswer),
    "forward": (steps.Forward, steps.ForwardAnswer),
    "where_is": (steps.LocateOwners, steps.LocateOwnersAnswer),
    "learn": (moves.Learn, moves.TransferResult),
    "state": (moves.ShardList, moves.TransferResult),
    "hand_over": (moves.HandOver, moves.TransferResult),
    "backing": (moves.ShardList, moves.TransferResult),
    "compare": (moves.CompareCopies, moves.TransferResult),
    "final_done": (moves.FinalDone, moves.TransferResult),
    "final_buffers": (moves.FinalBuffers, moves.FinalBuffersAnswer),
    "query_replicas": (moves.ShardList, moves.ReplicasAnswer),
    "fetch": (moves.Fetch, moves.ShardList),
    "offer_repair": (moves.ShardList, moves.ShardList),
    "request_repair": (moves.FindDeltas, moves.FoundDeltas),
    "repair": (moves.OfferedDeltas, moves.OfferedDeltasAnswer),
    "indirect": (steps.Indirect, steps.IndirectAnswer),
    "request_takeover": (moves.ShardList, moves.TransferResult),
    "lacking": (moves.FindLacking, moves.LackingDeltas),
}

#: Powers of two at which integers end, and steps between them.
POWERS = (8, 16, 31, 32, 33, 40, 46, 47, 48, 53, 61, 62, 63, 64)
FLOATS = (0.0, -0.0, 5e-324, 1e-100, 1e-12, 0.1, 0.5, 1.0, 2.0, 1e6, 1e9, 1e15, 1e18, 1e30, 3.4e38, 1e300, 1.7e308)
NOT_FINITE = (float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "10.0.0.2", "::1", "not an address", "10.0.0.2\0", "ok", "retry", "x" * 45, "é" * 20)
#: Entries of a generated list.
MAX_ITEMS = 3

Kind = Any


class Typed:
    """A generator of values. `ids` are bytes that mean something in the swarm under test: node ids, its genesis."""

    def __init__(self, chance: random.Random, ids: Sequence[bytes] = (), *, small: int = 12) -> None:
        self._chance = chance
        self._ids = ids
        self._small = small

    def value(self, kind: Any) -> Any:
        """A value of the type."""
        return self._made(inspect.type_info(kind))

    def changed(self, value: msgspec.Struct) -> msgspec.Struct:
        """The same message with one part replaced, or a list in it lengthened or shortened."""
        found: msgspec.Struct = self._replaced(inspect.type_info(type(value)), value)
        return found

    # -- whole values

    def _made(self, info: Kind) -> Any:
        chance = self._chance
        match info:
            case inspect.Metadata():
                return self._made(info.type)
            case inspect.NoneType():
                return None
            case inspect.BoolType():
                return chance.random() < 0.5
            case inspect.IntType():
                return self._integer(info)
            case inspect.FloatType():
                return self._float(info)
            case inspect.BytesType():
                return self._bytes(info)
            case inspect.StrType():
                return self._text(info)
            case inspect.LiteralType():
                return chance.choice(info.values)
            case inspect.EnumType():
                return chance.choice(list(info.cls))
            case inspect.UnionType():
                return self._made(chance.choice(info.types))
            case inspect.ListType() | inspect.VarTupleType():
                most = MAX_ITEMS if info.max_length is None else min(MAX_ITEMS, info.max_length)
                made = [self._made(info.item_type) for _ in range(chance.randint(info.min_length or 0, most))]
                return made if isinstance(info, inspect.ListType) else tuple(made)
            case inspect.TupleType():
                return tuple(self._made(one) for one in info.item_types)
            case inspect.DictType():
                pairs = range(chance.randint(0, MAX_ITEMS))
                return {self._made(info.key_type): self._made(info.value_type) for _ in pairs}
            case inspect.NamedTupleType():
                return info.cls(*(self._made(field.type) for field in info.fields))
            case inspect.StructType():
                return info.cls(**{field.name: self._made(field.type) for field in info.fields})
        raise NotImplementedError(info)

    def _integer(self, info: inspect.IntType) -> int:
        low = info.ge if info.ge is not None else -(1 << 63) if info.gt is None else info.gt + 1
        high = info.le if info.le is not None else (1 << 64) - 1 if info.lt is None else info.lt - 1
        near = [value for power in POWERS for value in ((1 << power) - 1, 1 << power) if low <= value <= high]
        match self._chance.randrange(5):
            case 0:
                return int(self._chance.choice([low, high]))
            case 1 if near:
                return self._chance.choice(near)
            case 2:
                return self._chance.randint(low, high)
        return self._chance.randint(max(low, 0), max(low, min(high, self._small)))

    def _float(self, info: inspect.FloatType) -> float:
        fit = [value for value in FLOATS + NOT_FINITE if _fits(info, value)]
        fit += [bound for bound in (info.ge, info.le) if bound is not None]
        return float(self._chance.choice(fit))

    def _bytes(self, info: inspect.BytesType) -> bytes:
        low, high = info.min_length or 0, 64 if info.max_length is None else info.max_length
        fit = [one for one in self._ids if low <= len(one) <= high]
        if fit and self._chance.random() < 0.8:
            return self._chance.choice(fit)
        size = self._chance.choice([low, min(high, 64), self._chance.randint(low, max(low, min(high, 64)))])
        return bytes(self._chance.getrandbits(8) for _ in range(size))

    def _text(self, info: inspect.StrType) -> str:
        low, high = info.min_length or 0, 60 if info.max_length is None else info.max_length
        text = self._chance.choice(TEXTS)[:high]
        return text if len(text) >= low else text + "x" * (low - len(text))

    # -- one part of a real value

    def _replaced(self, info: Kind, value: Any) -> Any:
        if isinstance(info, inspect.Metadata):
            return self._replaced(info.type, value)
        if isinstance(info, inspect.UnionType):
            kinds = [one for one in info.types if not isinstance(one, inspect.NoneType)]
            return self._replaced(kinds[0], value) if len(kinds) == 1 and value is not None else self._made(info)
        if isinstance(info, inspect.StructType | inspect.NamedTupleType) and info.fields:
            field = self._chance.choice(info.fields)
            part = self._replaced(field.type, getattr(value, field.name))
            if isinstance(info, inspect.NamedTupleType):
                return value._replace(**{field.name: part})
            return msgspec.structs.replace(value, **{field.name: part})
        if isinstance(info, inspect.TupleType):
            items = list(value)
            place = self._chance.randrange(len(items))
            items[place] = self._replaced(info.item_types[place], items[place])
            return tuple(items)
        if isinstance(info, inspect.ListType) and value:
            return self._list_changed(info, list(value))
        return self._made(info)

    def _list_changed(self, info: inspect.ListType, items: list[Any]) -> list[Any]:
        place = self._chance.randrange(len(items))
        match self._chance.randrange(8):
            case 0:
                del items[place]
            case 1:
                items.insert(place, items[place])
            case 2:
                items.insert(place, self._made(info.item_type))
            case _:
                items[place] = self._replaced(info.item_type, items[place])
        return items if info.max_length is None else items[: info.max_length]


def _fits(info: inspect.FloatType, value: float) -> bool:
    bounds: list[tuple[float | None, Callable[[float], bool]]] = [
        (info.ge, lambda bound: value >= bound),
        (info.gt, lambda bound: value > bound),
        (info.le, lambda bound: value <= bound),
        (info.lt, lambda bound: value < bound),
    ]
    return all(bound is None or holds(bound) for bound, holds in bounds)
