"""How values are pulled: whole, in float32 or bfloat16, or as a chain of changes in a shorter codec. Pure."""

from __future__ import annotations

from training.encoding.codecs import CodecName
from training.settings import ExchangeSettings

#: Values in these codecs are pulled whole. The others are too coarse for a value; they encode changes of it.
WHOLE: tuple[CodecName, ...] = ("float32", "bfloat16")


def pull_codec(settings: ExchangeSettings) -> CodecName:
    """The codec of pulled values or, if it is not one of `WHOLE`, of their changes: by default that of the pushes.

    For sparse pushes it is int4. A change joins the deltas of all, and is denser than each; int4 sends all of it.
    """
    if settings.pull_codec != "auto":
        return settings.pull_codec
    return "int4" if settings.codec == "sparse" else settings.codec


def whole_codec(settings: ExchangeSettings) -> CodecName:
    """The codec in which this node takes whole values of an owner that sends no changes."""
    codec = pull_codec(settings)
    return codec if codec in WHOLE else "bfloat16"


def follows_chains(settings: ExchangeSettings) -> bool:
    """Whether this node pulls changes."""
    return pull_codec(settings) not in WHOLE
