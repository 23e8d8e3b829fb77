"""How values are pulled: whole, or as a publication of changes in a codec that is too coarse for values. Pure.

| codec of pulls | a node takes whole values in | follows changes | and sends followers changes in |
|---|---|---|---|
| float32 | float32 | no | no changes |
| bfloat16 | bfloat16 | no | no changes; int4 where the codecs are chosen |
| another | bfloat16 | yes | that codec |

The codec of pulls is `exchange.pull_codec`, or by default that of the pushes now (`pushed`).
"""

from __future__ import annotations

from p2pnode.training.encoding.table import CHANGES, CODECS, LEAST_LOSSY, CodecName, WholeCodec
from p2pnode.training.settings import ExchangeSettings


def pull_codec(settings: ExchangeSettings, pushed: CodecName) -> CodecName:
    """The codec of pulled values or, if they are not pulled whole, of their changes."""
    return pushed if settings.pull_codec == "auto" else settings.pull_codec


def whole_codec(settings: ExchangeSettings, pushed: CodecName) -> WholeCodec:
    """The codec in which this node takes whole values of an owner that sends no changes."""
    codec = pull_codec(settings, pushed)
    return codec if CODECS[codec].is_whole else LEAST_LOSSY


def follows_changes(settings: ExchangeSettings, pushed: CodecName) -> bool:
    """Whether this node pulls changes."""
    return not CODECS[pull_codec(settings, pushed)].is_whole


def change_codec(settings: ExchangeSettings, pushed: CodecName) -> CodecName:
    """The codec in which this node, as an owner, encodes changes for those who pull them; one of whole values for none.

    An owner that chose whole values for itself, because its line is fast, still sends changes to those who ask for
    them, because their lines are slow.
    """
    codec = pull_codec(settings, pushed)
    is_chosen = settings.codec == "auto" and settings.pull_codec == "auto"
    return CHANGES if is_chosen and CODECS[codec].is_whole else codec
