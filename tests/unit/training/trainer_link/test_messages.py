"""The link's words: framing, and the node's own seed."""

from __future__ import annotations

import pytest

from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.interface import StepOrder


def test_messages_survive_any_cut_of_the_stream() -> None:
    """A stream cut into single bytes gives the messages that were sent, in order."""
    sent = [messages.Train(7, StepOrder(3, 10, 4.5, True)), messages.Cancel(7), messages.Stop(10.0)]
    stream = b"".join(messages.encode(message) for message in sent)
    decoder = messages.Decoder()

    got = [message for byte in stream for message in decoder.from_daemon(bytes([byte]))]

    assert got == sent


def test_two_messages_in_one_piece() -> None:
    """What arrives together is taken apart."""
    decoder = messages.Decoder()

    got = decoder.from_trainer(messages.encode(messages.Ready()) + messages.encode(messages.SignOfLife()))

    assert got == [messages.Ready(), messages.SignOfLife()]


def test_a_length_beyond_the_limit_is_refused_before_it_is_waited_for() -> None:
    """Four bytes that announce too much break the link at once."""
    with pytest.raises(messages.LinkBroken, match="announces"):
        messages.Decoder().from_trainer((messages.MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))


def test_junk_is_refused() -> None:
    """A body that is no message breaks the link, with a reason."""
    with pytest.raises(messages.LinkBroken, match="cannot be decoded"):
        messages.Decoder().from_daemon((3).to_bytes(4, "big") + b"abc")


def test_node_seeds_differ_by_node_and_by_seed_and_are_stable() -> None:
    """The node's seed is a function of the swarm's seed and the node's id, and fits into 63 bits."""
    first = messages.derive_node_seed(0, b"a" * 20)

    assert first == messages.derive_node_seed(0, b"a" * 20) == 5271637714414205739
    assert len({first, messages.derive_node_seed(1, b"a" * 20), messages.derive_node_seed(0, b"b" * 20)}) == 3
    assert 0 <= first < 1 << 63
