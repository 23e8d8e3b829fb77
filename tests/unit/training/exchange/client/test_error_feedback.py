"""Error feedback of lossy codecs: nothing that is rounded off is lost."""

from __future__ import annotations

import numpy as np
import pytest

from training.encoding import codecs
from training.encoding.codecs import CodecName
from training.exchange.client.error_feedback import LAST_SPARSE_VALUES, ErrorFeedback

BOUNDS = [(0, 100), (100, 200)]


@pytest.mark.parametrize("codec", ["int8", "bfloat16"])
def test_the_residual_is_sent_with_the_next_delta(codec: CodecName) -> None:
    """What was decoded so far and the residual add up to all deltas; the other shard has no residual."""
    feedback = ErrorFeedback(BOUNDS)
    values = np.random.default_rng(1).normal(size=100).astype(np.float32)
    decoded = np.zeros(100, np.float64)

    for _ in range(5):
        decoded += codecs.decoded(bytes(feedback.encode(1, values, codec)), codec, 100)

    assert feedback.residual_shards == {1}
    assert np.any(feedback.residual(1) != 0.0)
    np.testing.assert_allclose(decoded + feedback.residual(1), 5 * values.astype(np.float64), atol=1e-5)


def test_a_residual_that_moves_to_a_delta_is_sent_as_before() -> None:
    """The next encoding has the same bytes and leaves the same residual as if the feedback had kept it; the delta holds
    all of it meanwhile, and the shard without a residual is as it was."""
    random = np.random.default_rng(2)
    deltas = [random.normal(size=200).astype(np.float32) for _ in range(3)]
    kept, moved = ErrorFeedback(BOUNDS, 200), ErrorFeedback(BOUNDS, 200)
    for delta in deltas:
        whole = delta.copy()
        before = 0.95 * moved.residual(1)
        done: list[int] = []
        moved.move_to(whole, done.append)
        assert done == ([100] if before.any() else [])
        np.testing.assert_allclose(whole[100:], delta[100:] + before, rtol=1e-6)
        np.testing.assert_array_equal(whole[:100], delta[:100])
        assert moved.residual_shards == set()
        assert not moved.residual(1).any()

        encoded = [bytes(one.encode(1, values[100:], "sparse")) for one, values in ((kept, delta), (moved, whole))]
        assert codecs.decoded(encoded[0], "sparse", 100) == pytest.approx(codecs.decoded(encoded[1], "sparse", 100))
        assert kept.residual(1) == pytest.approx(moved.residual(1), abs=1e-6)
    assert np.abs(moved.residual(1)).max() > 1.0


def test_the_last_sparse_delta_leaves_little_out() -> None:
    """A quarter of the values of a block is sent instead of a few; more where the setting asks for more."""
    values = np.random.default_rng(4).normal(size=4096).astype(np.float32)
    for asked, expected in ((64, LAST_SPARSE_VALUES), (2048, 2048)):
        feedback = ErrorFeedback([(0, 4096)], asked)
        sent = codecs.decoded(bytes(feedback.encode(0, values, "sparse")), "sparse", 4096)
        assert np.count_nonzero(sent) == asked

        sent = codecs.decoded(bytes(feedback.encode(0, values, "sparse", is_last=True)), "sparse", 4096)
        assert np.count_nonzero(sent) == expected


def test_a_cleared_residual_is_zero() -> None:
    """After an exact addition of the residual it must not be sent again."""
    feedback = ErrorFeedback(BOUNDS)
    feedback.encode(0, np.full(100, 1 / 3, np.float32), "bfloat16")

    feedback.clear_residual(0)

    assert feedback.residual_shards == set()
    assert not feedback.residual(0).any()
