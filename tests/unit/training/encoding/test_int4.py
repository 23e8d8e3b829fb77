"""int4 with NumPy: where in a block each level is, and the last block."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from p2pnode.training import kernels
from p2pnode.training.encoding import codecs


@pytest.fixture(autouse=True)
def numpy_alone() -> Iterator[None]:
    before, kernels.COMPILED = kernels.COMPILED, None
    yield
    kernels.COMPILED = before


def test_two_levels_share_a_byte() -> None:
    """The first half of a block is in the lower halves of its bytes, the second in the upper ones."""
    values = np.zeros(64, dtype=np.float32)
    values[[0, 1, 32, 33]] = [7.0, -1.0, 2.0, -7.0]

    data = bytes(codecs.encode(values, "int4"))

    assert data.hex() == "803f" + "27" + "9f" + "00" * 30
    assert np.array_equal(codecs.decoded(data, "int4", 64), values)


def test_the_last_block_may_have_an_odd_number_of_values() -> None:
    """Its middle value is in the last byte, whose upper half is zero."""
    values = np.float32([1.0, 2.0, 7.0])

    data = bytes(codecs.encode(values, "int4"))

    assert data.hex() == "803f" + "71" + "02"
    assert np.array_equal(codecs.decoded(data, "int4", 3), values)


def test_an_outlier_spoils_its_own_block_alone() -> None:
    """One huge value: its block of 64 loses the small ones, the next does not."""
    values = np.ones(128, dtype=np.float32)
    values[7] = 1e6

    back = codecs.decoded(codecs.encode(values, "int4"), "int4", 128)

    assert back[7] == pytest.approx(1e6, rel=2**-8)
    assert not back[8:64].any()
    assert np.allclose(back[64:], 1.0, rtol=2**-8)


def test_a_value_that_is_not_finite_spoils_its_block() -> None:
    """The whole block decodes as NaN, from an infinite scale; the others are as they were."""
    values = np.ones(128, dtype=np.float32)
    values[3] = np.nan
    residual = np.zeros(128, dtype=np.float32)

    data = codecs.encode_with_feedback(values, residual, "int4")

    back = codecs.decoded(data, "int4", 128)
    assert np.isnan(back[:64]).all()
    assert np.allclose(back[64:], 1.0, rtol=2**-8)
    assert not residual.any()
