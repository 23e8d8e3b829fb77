"""sparse: of each block of 4,096 values the largest, two bits each, and their places; a NumPy twin of the kernels.

A block begins with the number of values sent, as LEB128; of a block of zeros that is all, one byte. Then follow two
magnitudes, bfloat16, little-endian: the means of those below and above the mean magnitude of the values sent. Then the
indices in the block, rising, 12 bits each, two in three bytes: `i & 255`, `i >> 8 | (j & 15) << 4`, `j >> 4`. Then two
bits a value, four in a byte from the lowest: the sign, and whether it has the second magnitude. Unused bits are zero.

A block sends `per_block` values, the last and shorter one as many in proportion; of equal magnitudes the first ones.
The infinite magnitude is a valid code: it marks a block with a value that is not finite, which the owner refuses. What
is not sent stays in the residual. A residual that comes with a later delta decays first (SparseLoCo, arXiv 2508.15706);
an exchange gives zeros, because the trainer, or the next change of a publication, keeps what is not sent. Sums are
those of doubles, in order, so that the compiled kernels give the same bits. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from p2pnode.training import kernels
from p2pnode.training.encoding.arithmetic import Arithmetic, Encoded, Vector
from p2pnode.training.encoding.whole import upper_halves

BLOCK_VALUES = kernels.SPARSE_BLOCK_VALUES
#: Of a node's last delta: nearly all of it, at 0.44 bytes per value. Promise 21: no later delta brings what it lacks.
LAST_PER_BLOCK = 1024
#: What is left of a residual when it is added to the next delta.
DECAY = 0.95
_MIN_VALUE = np.float32(1e-30)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITE = np.uint32(0x7F800000)
_ERRORS = {
    -1: "ends inside a block",
    -2: "has more blocks than the array",
    -3: "sends more values than a block has",
    -4: "has a magnitude that is no number",
    -5: "has an index beyond its block",
    -6: "has indices that do not rise",
    -7: "has bits set that must be zero",
}
_TRUNCATED, _TRAILING, _BAD_COUNT, _BAD_MAGNITUDE, _BAD_INDEX, _NOT_RISING, _BAD_PADDING = sorted(_ERRORS, reverse=True)


class Sparse(Arithmetic):
    """The largest values of each block."""

    is_compiled = True

    def pack(self, values: Vector) -> bytes:
        return _packed(values.copy(), self.codec.sent_values)[0]

    def unpack(self, view: memoryview, into: Vector) -> None:
        found = _blocks(view, into.size)
        if len(found) != -(-into.size // BLOCK_VALUES):
            raise _error(view, _TRUNCATED)
        into[:] = 0.0
        for number, (places, values) in enumerate(found):
            into[number * BLOCK_VALUES + places] = values

    def encode_with_feedback(self, delta: Vector, residual: Vector, *, is_last: bool = False) -> Encoded:
        sent_values = self.codec.sent_values
        return encode_largest(delta, residual, max(LAST_PER_BLOCK, sent_values) if is_last else sent_values)

    def decode(self, view: memoryview, into: Vector) -> None:
        if (compiled := self._compiled(into)) is None or not len(view):
            self.unpack(view, into)
        elif error := compiled.decode_sparse(np.frombuffer(view, dtype=np.uint8), into):
            raise _error(view, error)

    def max_bytes(self, values: int) -> int:
        """As many as where every value is sent, which a decoder must accept."""
        return kernels.sparse_bytes(values, BLOCK_VALUES)

    def count_values(self, view: memoryview, most: int) -> int:
        if kernels.COMPILED is None or not len(view):
            return min(most, len(_blocks(view, most)) * BLOCK_VALUES)
        blocks = kernels.COMPILED.check_sparse(np.frombuffer(view, dtype=np.uint8), most)
        if blocks < 0:
            raise _error(view, blocks)
        return min(most, blocks * BLOCK_VALUES)

    def cuts(self, view: memoryview, unit: int) -> Iterator[tuple[int, int]]:
        stop = 0
        while stop < len(view):
            start = stop
            for _ in range(unit // BLOCK_VALUES):
                if stop < len(view):
                    stop = _block_end(view, stop)
            yield start, stop


def encode_largest(delta: Vector, residual: Vector, per_block: int) -> Encoded:
    """Encode `DECAY · residual + delta`, with `per_block` values of each whole block; the others stay in `residual`."""
    if kernels.COMPILED is not None and kernels.fits(delta, residual):
        buffer = np.empty(kernels.sparse_bytes(delta.size, per_block), dtype=np.uint8)
        given = (delta, residual, DECAY, buffer, per_block)
        written, is_finite = kernels.COMPILED.encode_sparse_with_feedback(*given)
        # A slice would keep the whole buffer, of which an encoding with many zeros needs little.
        encoded: Encoded = buffer.data[:written] if 2 * written > buffer.size else bytes(buffer.data[:written])
    else:
        with np.errstate(invalid="ignore", over="ignore"):
            residual *= np.float32(DECAY)
            residual += delta
        encoded, is_finite = _packed(residual, per_block)
    if not is_finite:
        residual[:] = 0.0
    return encoded


def _packed(values: Vector, per_block: int) -> tuple[bytes, bool]:
    """Encode contiguous values, of which those sent are subtracted. Also returns whether all were and are finite."""
    parts = []
    is_finite = True
    for start in range(0, values.size, BLOCK_VALUES):
        block = values[start : start + BLOCK_VALUES]
        data, is_good = _encode_block(block, -(-per_block * block.size // BLOCK_VALUES))
        parts.append(data)
        is_finite = is_finite and is_good
    return b"".join(parts), is_finite


def _encode_block(block: Vector, wanted: int) -> tuple[bytes, bool]:
    magnitudes = block.view(np.uint32) & _MAGNITUDE
    largest = magnitudes.max()
    if largest >= _INFINITE:
        return b"\x01\x80\x7f\x80\x7f\x00\x00\x00", False
    if largest < _MIN_VALUE.view(np.uint32):
        return b"\x00", True
    places = _largest(magnitudes, wanted)
    sent = block[places]
    sizes = np.abs(sent).astype(np.float64)
    mean = np.float32(np.cumsum(sizes)[-1] / sizes.size)
    is_large = np.abs(sent) > mean
    means = []
    for among in (~is_large, is_large):
        count = np.count_nonzero(among)
        means.append(np.float32(np.cumsum(np.where(among, sizes, 0.0))[-1] / count) if count else None)
    pair = [mean if mean is not None else other for mean, other in zip(means, means[::-1], strict=True)]
    halves = upper_halves(np.array(pair, dtype=np.float32))
    signs = sent.view(np.uint32) >> np.uint32(31)
    bits = halves[is_large.astype(np.intp)] << np.uint32(16) | signs << np.uint32(31)
    with np.errstate(over="ignore"):
        left = sent - bits.view(np.float32)
    block[places] = left
    data = _joined(halves.astype("<u2").tobytes(), places, signs | is_large.astype(np.uint32) << np.uint32(1))
    return data, bool(np.isfinite(left).all())


def _joined(magnitudes: bytes, places: npt.NDArray[np.intp], codes: npt.NDArray[np.uint32]) -> bytes:
    """One block: the encoded magnitudes, and per value sent its place and its two bits."""
    head = bytes([places.size]) if places.size < 0x80 else bytes([places.size & 0x7F | 0x80, places.size >> 7])
    padded = np.zeros(-(-places.size // 4) * 4, dtype=np.uint32)
    padded[: places.size] = codes
    packed = padded.reshape(-1, 4) << np.arange(0, 8, 2, dtype=np.uint32)
    return head + magnitudes + _pack_indices(places) + bytes(packed.sum(axis=1).astype(np.uint8))


def _largest(magnitudes: npt.NDArray[np.uint32], wanted: int) -> npt.NDArray[np.intp]:
    """The places of the largest, rising; of equal ones the first. Zeros are never among them."""
    wanted = min(wanted, int(np.count_nonzero(magnitudes)))
    threshold = np.partition(magnitudes, magnitudes.size - wanted)[magnitudes.size - wanted]
    is_taken = magnitudes > threshold
    ties = np.flatnonzero(magnitudes == threshold)
    is_taken[ties[: wanted - np.count_nonzero(is_taken)]] = True
    return np.flatnonzero(is_taken)


def _pack_indices(places: npt.NDArray[np.intp]) -> bytes:
    pairs = np.zeros(places.size + places.size % 2, dtype=np.intp)
    pairs[: places.size] = places
    first, second = pairs[::2], pairs[1::2]
    data = np.stack([first & 255, first >> 8 | (second & 15) << 4, second >> 4], axis=1).astype(np.uint8).tobytes()
    return data[: (3 * places.size + 1) // 2]


def _unpack_indices(data: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.intp]:
    triples = np.zeros(-(-count // 2) * 3, dtype=np.intp)
    triples[: data.size] = data
    low, middle, high = triples.reshape(-1, 3).T
    return np.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], axis=1).ravel()[:count]


def _blocks(view: memoryview, values: int) -> list[tuple[npt.NDArray[np.intp], Vector]]:
    """The blocks' places and values. Raises `ValueError`."""
    data = np.frombuffer(view, dtype=np.uint8)
    blocks, at = [], 0
    while at < data.size:
        size = min(values, BLOCK_VALUES)
        values -= size
        if not size:
            raise _error(view, _TRAILING)
        count, at = _count(view, at)
        if count > size:
            raise _error(view, _BAD_COUNT)
        if not count:
            blocks.append((np.empty(0, dtype=np.intp), np.empty(0, dtype=np.float32)))
            continue
        codes_at = at + 4 + (3 * count + 1) // 2
        end = codes_at + (count + 3) // 4
        if end > data.size:
            raise _error(view, _TRUNCATED)
        magnitudes = data[at : at + 4].view("<u2").astype(np.uint32) << np.uint32(16)
        if (magnitudes > _INFINITE).any():
            raise _error(view, _BAD_MAGNITUDE)
        places = _unpack_indices(data[at + 4 : codes_at], count)
        wrong = [(places >= size).nonzero()[0], (np.diff(places) <= 0).nonzero()[0] + 1]
        beyond, falling = (int(found[0]) if found.size else count for found in wrong)
        if min(beyond, falling) < count:
            raise _error(view, _BAD_INDEX if beyond <= falling else _NOT_RISING)
        if (count % 2 and data[codes_at - 1] >> 4) or (count % 4 and data[end - 1] >> 2 * (count % 4)):
            raise _error(view, _BAD_PADDING)
        codes = _codes(data[codes_at:end], count)
        bits = magnitudes[codes >> np.uint32(1) & np.uint32(1)] | codes << np.uint32(31)
        blocks.append((places, bits.view(np.float32)))
        at = end
    return blocks


def _codes(data: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.uint32]:
    """The two bits of each of `count` values."""
    return (data[:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & np.uint8(3)).ravel()[:count].astype(np.uint32)


def _count(view: memoryview, at: int) -> tuple[int, int]:
    count = view[at]
    if count < 0x80:
        return count, at + 1
    if at + 1 == len(view):
        raise _error(view, _TRUNCATED)
    upper = view[at + 1]
    if not 0 < upper < 0x80:
        raise _error(view, _BAD_COUNT)
    return count & 0x7F | upper << 7, at + 2


def _block_end(view: memoryview, at: int) -> int:
    """Where the block that begins at this byte ends, for bytes that were checked."""
    count, at = _count(view, at)
    return at + 4 + (3 * count + 1) // 2 + (count + 3) // 4 if count else at


def _error(view: memoryview, number: int) -> ValueError:
    return ValueError(f"{len(view)} bytes of sparse: the encoding {_ERRORS[number]}")
