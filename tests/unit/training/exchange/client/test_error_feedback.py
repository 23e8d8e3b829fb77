"""Error feedback of lossy codecs: nothing that is rounded off is lost."""

from __future__ import annotations

import numpy as np
import pytest

from training.encoding import codecs
from training.encoding.codecs import CodecName
from training.exchange.client.error_feedback import ErrorFeedback

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


def test_a_cleared_residual_is_zero() -> None:
    """After an exact addition of the residual it must not be sent again."""
    feedback = ErrorFeedback(BOUNDS)
    feedback.encode(0, np.full(100, 1 / 3, np.float32), "bfloat16")

    feedback.clear_residual(0)

    assert feedback.residual_shards == set()
    assert not feedback.residual(0).any()
