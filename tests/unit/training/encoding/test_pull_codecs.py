"""Which codec pulls have, given the settings and the codec of the pushes now."""

from __future__ import annotations

import pytest

from p2pnode.training.encoding.pull_codecs import change_codec, follows_changes, pull_codec, whole_codec
from p2pnode.training.encoding.table import CODECS, CodecName
from p2pnode.training.settings import ExchangeSettings


@pytest.mark.parametrize(
    ("codec", "whole", "follows"),
    [
        ("float32", "float32", False),
        ("bfloat16", "bfloat16", False),
        *((name, "bfloat16", True) for name, codec in CODECS.items() if not codec.is_whole),
    ],
)
def test_by_default_pulls_follow_the_pushes(codec: CodecName, whole: CodecName, follows: bool) -> None:
    """Also where the pushes' codec is chosen, and whatever it was before."""
    for settings in (ExchangeSettings(codec=codec), ExchangeSettings(codec="auto")):
        assert (pull_codec(settings, codec), whole_codec(settings, codec)) == (codec, whole)
        assert follows_changes(settings, codec) is follows


def test_an_owner_on_a_fast_line_still_sends_changes_to_those_who_ask() -> None:
    """Only where codecs are chosen: with a codec that is set, whole values stay whole."""
    assert change_codec(ExchangeSettings(codec="auto"), "bfloat16") == "int4"
    assert change_codec(ExchangeSettings(codec="auto"), "int8") == "int8"
    assert change_codec(ExchangeSettings(codec="auto", pull_codec="bfloat16"), "int8") == "bfloat16"
    assert change_codec(ExchangeSettings(codec="bfloat16"), "bfloat16") == "bfloat16"
    assert change_codec(ExchangeSettings(codec="sparse"), "sparse") == "sparse"
