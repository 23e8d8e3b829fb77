"""What a holder of rounded values is sent gives it every bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from p2pnode.training.encoding import codecs, low_bits
from p2pnode.training.encoding.codecs import Vector

#: Any bit pattern: infinities, NaNs and denormals too.
PATTERNS = arrays(np.uint32, st.integers(1, 60), elements=st.integers(0, 2**32 - 1))


def rounded(value: Vector) -> Vector:
    base = np.empty_like(value)
    codecs.decode(codecs.encode(value, "bfloat16"), "bfloat16", base)
    return base


def test_a_rounded_value_and_two_bytes_make_the_value() -> None:
    """Of normal numbers, zeros of both signs, and numbers halfway between two rounded ones."""
    value = np.random.default_rng(5).standard_normal(5000).astype(np.float32)
    value[:3] = 0.0, -0.0, np.float32(1e-42)
    halfway = value.view(np.uint32)
    halfway[10:12] = 0x3F808000, 0x3F818000  # to even: down, and up
    found = low_bits.encode(value, rounded(value))

    assert found is not None
    assert len(found.low) == 2 * value.size
    assert [place for place, _ in found.exceptions] == [10]
    again = low_bits.decode(bytes(found.low), found.exceptions, rounded(value))
    assert again.tobytes() == value.tobytes()


@given(PATTERNS, PATTERNS)
def test_any_base_gives_the_value_or_is_refused(bits: np.ndarray, other: np.ndarray) -> None:
    """Whatever the patterns: either every bit comes back, or the base is too far away."""
    size = min(bits.size, other.size)
    value, base = bits[:size].view(np.float32), other[:size].view(np.float32)
    found = low_bits.encode(value, base)
    if found is None:
        assert sum(abs(int(a) - int(b)) >= 1 << 15 for a, b in zip(bits, other, strict=False)) > 4
    else:
        assert low_bits.decode(found.low, found.exceptions, base).tobytes() == value.tobytes()


def test_a_distant_base_is_no_help() -> None:
    """A value that has been trained for some steps is not near enough."""
    rng = np.random.default_rng(6)
    value = rng.standard_normal(4096).astype(np.float32)
    moved = value + rng.standard_normal(4096).astype(np.float32) * np.float32(0.05)
    assert low_bits.encode(moved, rounded(value)) is None


def test_wrong_sizes_are_refused() -> None:
    """The bytes of another number of values, and exceptions at places that there are not."""
    base = np.zeros(4, np.float32)
    for low, exceptions in ((bytes(6), []), (bytes(10), []), (bytes(8), [(4, 0)]), (bytes(8), [(-1, 0)])):
        with pytest.raises(ValueError, match="values"):
            low_bits.decode(low, exceptions, base)
