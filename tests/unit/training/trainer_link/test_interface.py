"""The failure of a trainer, and the structs that are sent."""

from __future__ import annotations

import msgspec

from p2pnode.training.errors import TrainingError
from p2pnode.training.layout import Layout, LayoutEntry
from p2pnode.training.trainer_link.interface import TrainerFailed, TrainerHello


def test_a_failure_carries_reason_hint_and_whether_it_is_fatal() -> None:
    """Its text is the reason; without arguments it is not fatal and has no hint."""
    failure = TrainerFailed("no data", "name a folder", fatal=True)

    assert (str(failure), failure.reason, failure.hint, failure.fatal) == ("no data", "no data", "name a folder", True)
    assert (TrainerFailed("no data").hint, TrainerFailed("no data").fatal) == ("", False)
    assert isinstance(failure, TrainingError)


def test_a_hello_survives_its_encoding() -> None:
    """The layout arrives as it was, shapes as tuples, so that two of them can be compared."""
    layout = Layout((LayoutEntry("weight", (3, 2), "bfloat16", "parameter", 0, 6),))
    hello = TrainerHello(layout, "digits", "1", "", "cpu", evaluates=True, pid=7)

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(hello), type=TrainerHello) == hello
