"""How values are pulled: whole, in float32 or bfloat16, or as a publication of changes in a shorter codec. Pure."""

from __future__ import annotations

from typing import Literal

from p2pnode.training.encoding.codecs import CodecName
from p2pnode.training.settings import ExchangeSettings

#: Values in these codecs are pulled whole. The others are too coarse for a value; they encode changes of it.
WHOLE: tuple[CodecName, ...] = ("float32", "bfloat16")


def pulled_in(pushed: CodecName) -> CodecName:
    """The codec of pulls that goes with a codec of pushes: the same, and int4 for sparse.

    A change joins the deltas of all, and is denser than each; int4 sends all of it.
    """
    return "int4" if pushed == "sparse" else pushed


def pull_codec(settings: ExchangeSettings, pushed: CodecName) -> CodecName:
    """The codec of pulled values or, if it is not one of `WHOLE`, of their changes: by default that of the pushes.

    `pushed` is the codec of this node's pushes now.
    """
    return pulled_in(pushed) if settings.pull_codec == "auto" else settings.pull_codec


def whole_codec(settings: ExchangeSettings, pushed: CodecName) -> Literal["float32", "bfloat16"]:
    """The codec in which this node takes whole values of an owner that sends no changes."""
    return "float32" if pull_codec(settings, pushed) == "float32" else "bfloat16"


def subscribes(settings: ExchangeSettings, pushed: CodecName) -> bool:
    """Whether this node pulls changes."""
    return pull_codec(settings, pushed) not in WHOLE


def change_codec(settings: ExchangeSettings, pushed: CodecName) -> CodecName:
    """The codec in which this node, as an owner, encodes changes for those who pull them; one of `WHOLE` for none.

    An owner that chose whole values for itself, because its line is fast, still sends int4 changes to those who ask for
    changes, because their lines are slow.
    """
    codec = pull_codec(settings, pushed)
    is_chosen = settings.codec == "auto" and settings.pull_codec == "auto"
    return "int4" if is_chosen and codec in WHOLE else codec
