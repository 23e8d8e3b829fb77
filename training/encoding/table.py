"""The table of codecs. A new codec is an entry here, and a class with its arithmetic (`training.encoding.arithmetic`).

Nodes of earlier versions cannot read it: raise `training.manifest.PROTOCOL`, and name it in docs/protocol.md. Settings,
their documentation, the choice of `exchange.codec = "auto"`, the messages and the property tests follow from the table.
It needs no NumPy, because commands that only read the settings import it. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

#: The name of a codec in the table.
CodecName: TypeAlias = str


@dataclass(frozen=True, slots=True)
class Codec:
    """An encoding of float32 values.

    `number`: its code in a frame's header. `arithmetic`: "module:Class" of a
    subclass of `Arithmetic`. `bits`: of one value. `block_values`: how many values share `scale_bytes`; an encoding may
    be cut after each block. `has_fixed_size`: the number of values determines the bytes; otherwise `bits` and
    `scale_bytes` are those of a usual block.

    `is_automatic`: `exchange.codec = "auto"` may choose it. `is_whole`: exact enough for values; other codecs encode
    changes of values. `sent_values`: how many values of a block an encoding has, where the others follow with later
    deltas; 0: all of them.
    """

    name: CodecName
    number: int
    arithmetic: str
    bits: float
    block_values: int = 1
    scale_bytes: int = 0
    has_fixed_size: bool = True
    is_automatic: bool = False
    is_whole: bool = False
    sent_values: int = 0

    @property
    def is_partial(self) -> bool:
        """Whether an encoding lacks most values of a delta."""
        return self.sent_values > 0

    @property
    def bytes_per_value(self) -> float:
        """Encoded bytes per value of a long array, the scales included."""
        return self.bits / 8 + self.scale_bytes / self.block_values

    def size_bytes(self, values: int) -> int:
        """Bytes of this number of values. Raises `ValueError` if they depend on the values."""
        if not self.has_fixed_size:
            raise ValueError(f"the size of a {self.name} encoding depends on the values")
        return -(-values * int(self.bits) // 8) + self.scale_bytes * -(-values // self.block_values)

    def count_values(self, size_bytes: int, most: int) -> int:
        """How many of the next `most` values of an array have so many bytes. Raises `ValueError` if they would end
        inside a block, or are more."""
        if size_bytes == self.size_bytes(most):
            return most
        blocks, rest = divmod(size_bytes, self.size_bytes(self.block_values))
        if rest or blocks * self.block_values > most:
            raise ValueError(f"{size_bytes} bytes of {self.name} are neither whole blocks nor {most} values")
        return blocks * self.block_values


_HERE = "p2pnode.training.encoding"
SPARSE_BLOCK_VALUES = 4096


def _sparse(name: CodecName, number: int, sent_values: int) -> Codec:
    """The largest values of each block, in 14 bits each."""
    return Codec(
        name,
        number,
        f"{_HERE}.sparse:Sparse",
        bits=14 * sent_values / SPARSE_BLOCK_VALUES,
        block_values=SPARSE_BLOCK_VALUES,
        scale_bytes=6,
        has_fixed_size=False,
        is_automatic=True,
        sent_values=sent_values,
    )


#: By name, most exact first.
CODECS: dict[CodecName, Codec] = {
    codec.name: codec
    for codec in (
        Codec("float32", 0, f"{_HERE}.whole:Float32", 32, is_whole=True),
        Codec("bfloat16", 1, f"{_HERE}.whole:BFloat16", 16, is_automatic=True, is_whole=True),
        Codec("int8", 2, f"{_HERE}.int8:Int8", 8, 1024, 4, is_automatic=True),
        Codec("int4", 3, f"{_HERE}.int4:Int4", 4, 64, 2, is_automatic=True),
        _sparse("sparse512", 7, 512),
        _sparse("sparse256", 6, 256),
        _sparse("sparse", 4, 128),
        _sparse("sparse64", 5, 64),
    )
}
#: Numbers of former codecs, which are not given again; the next new one is 9.
RETIRED = frozenset({8})
#: By number in a frame's header.
NAMES: dict[int, CodecName] = {codec.number: name for name, codec in CODECS.items()}

#: What "auto" chooses among, most exact first.
CHOICES: tuple[CodecName, ...] = tuple(name for name, codec in CODECS.items() if codec.is_automatic)
SPARSE_CHOICES: tuple[CodecName, ...] = tuple(name for name in CHOICES if CODECS[name].is_partial)
#: What "auto" settles on where the line is fast and training waits for it, or a step has few bytes.
LEAST_LOSSY = CHOICES[0]
#: In this an owner that pulls whole values sends changes to those who ask for them.
CHANGES: CodecName = "int4"

if TYPE_CHECKING:
    CodecSetting: TypeAlias = str
    WholeCodec: TypeAlias = str
else:
    #: What `exchange.codec` may be, and in what whole values may be asked for.
    CodecSetting = Literal["auto", *CODECS]
    WholeCodec = Literal[tuple(name for name, codec in CODECS.items() if codec.is_whole)]


def in_words(names: list[str], last: str) -> str:
    """As "a, b and c", with `last` = "and"."""
    return f" {last} ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
