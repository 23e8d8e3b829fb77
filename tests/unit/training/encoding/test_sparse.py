"""sparse with NumPy: the format byte by byte, what is selected, what stays, and every malformed encoding refused."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from p2pnode.training import kernels
from p2pnode.training.encoding import codecs, sparse
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.table import CODECS


@pytest.fixture(autouse=True)
def numpy_alone() -> Iterator[None]:
    """The kernels are compared with this module in tests/property/test_kernels.py."""
    before, kernels.COMPILED = kernels.COMPILED, None
    yield
    kernels.COMPILED = before


def decoded(data: codecs.Encoded, size: int) -> Vector:
    return codecs.decoded(data, "sparse", size)


def of(size: int, values: dict[int, float]) -> Vector:
    vector = np.zeros(size, dtype=np.float32)
    for place, value in values.items():
        vector[place] = value
    return vector


def test_the_bytes_of_a_block() -> None:
    """Golden: three values, magnitudes 1 and 3, indices 1, 0x234 and 0xfff, codes small, large negative, small."""
    values = of(4096, {1: 1.0, 0x234: -3.0, 0xFFF: 1.0})

    data = bytes(codecs.encode(values, "sparse"))

    assert data.hex() == "03" + "803f" + "4040" + "014023" + "ff0f" + f"{0b00_00_11_00 | 0:02x}"
    assert np.array_equal(decoded(data, 4096), values)


def test_a_block_of_zeros_is_one_byte() -> None:
    """So are values too small for a magnitude; the last and shorter block too."""
    assert bytes(codecs.encode(np.zeros(4096 + 10, dtype=np.float32), "sparse")) == b"\x00\x00"
    assert bytes(codecs.encode(np.full(10, 1e-31, dtype=np.float32), "sparse")) == b"\x00"


@pytest.mark.parametrize(("size", "sent"), [(4096, 128), (4097, 129), (2048, 64), (33, 2), (32, 1), (1, 1)])
def test_a_shorter_block_sends_as_many_in_proportion(size: int, sent: int) -> None:
    """The last block sends its share of 128 in 4,096, rounded up."""
    values = np.random.default_rng(size).standard_normal(size).astype(np.float32)

    assert np.count_nonzero(decoded(codecs.encode(values, "sparse"), size)) == sent


def test_the_largest_are_sent_and_of_equal_ones_the_first() -> None:
    """128 of a block: the largest by magnitude, and of ties the lowest places."""
    values = np.full(4096, 0.5, dtype=np.float32)
    values[[4000, 7, 100]] = [-9.0, 8.0, 10.0]

    back = decoded(codecs.encode(values, "sparse"), 4096)

    assert np.flatnonzero(back).tolist() == [*range(127), 4000]
    assert back[4000] == -9.0 == -back[7]
    assert (back[:7] == 0.5).all()


def test_what_is_not_sent_stays() -> None:
    """The residual is 0.95 times the old one plus the delta less what was decoded; nothing else is lost."""
    random = np.random.default_rng(2)
    delta, residual = (random.standard_normal(10_000).astype(np.float32) for _ in range(2))
    owed = residual * np.float32(0.95) + delta

    data = codecs.encode_with_feedback(delta, residual, "sparse")

    assert np.array_equal(residual, owed - decoded(data, 10_000))
    assert np.count_nonzero(residual != owed) == 128 + 128 + -(-128 * 1808 // 4096)


def block(count: bytes, magnitudes: str = "803f4040", rest: str = "") -> bytes:
    return count + bytes.fromhex(magnitudes + rest)


GOOD = block(b"\x02", rest="014000" + "00")  # indices 1 and 4


@pytest.mark.parametrize(
    ("data", "size", "reason"),
    [
        (b"", 10, "ends inside"),
        (GOOD[:-1], 10, "ends inside"),
        (GOOD[:3], 10, "ends inside"),
        (b"\x82", 4096, "ends inside"),
        (GOOD, 4097, "ends inside"),
        (GOOD + b"\x00", 4096, "more blocks"),
        (GOOD + GOOD, 10, "more blocks"),
        (block(b"\x0b", rest="00" * 20), 10, "more values"),
        (block(b"\x80\x00", rest="00" * 20), 10, "more values"),
        (block(b"\x81\x80", rest="00" * 20), 10, "more values"),
        (block(b"\x81\x20", rest="00" * 9000), 4096, "more values"),
        (block(b"\x02", "803f807f", "014000" + "00"), 10, None),
        (block(b"\x02", "803f817f", "014000" + "00"), 10, "no number"),
        (block(b"\x02", "803fc07f", "014000" + "00"), 10, "no number"),
        (block(b"\x02", "80bf4040", "014000" + "00"), 10, "no number"),
        (block(b"\x02", rest="01a000" + "00"), 10, "beyond"),
        (block(b"\x02", rest="011000" + "00"), 10, "not rise"),
        (block(b"\x02", rest="041000" + "00"), 10, "not rise"),
        (block(b"\x01", rest="0110" + "00"), 10, "must be zero"),
        (block(b"\x02", rest="014000" + "10"), 10, "must be zero"),
        (GOOD, 10, None),
        (GOOD, 5, None),
        (GOOD, 4, "beyond"),
    ],
)
def test_what_is_no_encoding_is_refused(data: bytes, size: int, reason: str | None) -> None:
    """Each fault is named, and nothing is written; the infinite magnitude is valid, for an owner to refuse."""
    into = np.full(size, 9.0, dtype=np.float32)

    if reason is None:
        codecs.decode(data, "sparse", into)
        assert np.count_nonzero(into) == 2
        return
    with pytest.raises(ValueError, match=reason):
        codecs.decode(data, "sparse", into)
    assert (into == 9.0).all()


def test_blocks_are_counted_and_cut() -> None:
    """A part of an encoding that ends with a block counts its values; the cuts are where the blocks end."""
    values = np.random.default_rng(3).standard_normal(3 * 4096 + 5).astype(np.float32)
    values[4096:8192] = 0.0
    data = memoryview(codecs.encode(values, "sparse"))
    found = codecs.arithmetic("sparse")

    assert list(found.cuts(data, 4096)) == [(0, 230), (230, 231), (231, 461), (461, len(data))]
    assert list(found.cuts(data, 8192)) == [(0, 231), (231, len(data))]
    assert found.count_values(data[:231], values.size) == 8192
    with pytest.raises(ValueError, match="ends inside"):
        found.count_values(data[: 231 + 5], values.size)


def test_the_last_delta_sends_more() -> None:
    """1,024 of 4,096 values: nearly all of it arrives, because no later delta brings the rest."""
    delta = np.random.default_rng(4).standard_normal(4096).astype(np.float32)

    data = codecs.encode_with_feedback(delta, np.zeros_like(delta), "sparse", is_last=True)

    assert np.count_nonzero(decoded(data, 4096)) == 1024
    assert len(data) <= codecs.arithmetic("sparse").max_bytes(4096) == 7174
    with pytest.raises(ValueError, match="depends on the values"):
        CODECS["sparse"].size_bytes(10)


def test_what_is_sent_in_the_end() -> None:
    """Of a constant delta everything arrives in time but what decays: the error feedback sends what was passed over."""
    delta = np.random.default_rng(6).standard_normal(4096).astype(np.float32)
    residual, arrived = np.zeros_like(delta), np.zeros_like(delta)
    decayed = np.zeros(4096, dtype=np.float64)
    for _ in range(60):
        decayed += residual * (1 - sparse.DECAY)
        arrived += decoded(codecs.encode_with_feedback(delta, residual, "sparse"), 4096)

    np.testing.assert_allclose(arrived + residual + decayed, 60 * delta, rtol=0, atol=1e-3)
    assert np.dot(arrived, delta) / np.linalg.norm(arrived) / np.linalg.norm(delta) > 0.9
