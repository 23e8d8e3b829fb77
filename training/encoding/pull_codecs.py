"""How values are pulled: whole, or as a publication of changes in a codec that is too coarse for values. Pure."""

from __future__ import annotations

from p2pnode.training.encoding.table import CHANGES, CODECS, LEAST_LOSSY, CodecName, WholeCodec
from p2pnode.training.settings import ExchangeSettings


def is_whole(codec: CodecName) -> bool:
    """Whether values are pulled whole in this codec; others encode changes of them."""
    return CODECS[codec].is_whole


def pull_codec(settings: ExchangeSettings, pushed: CodecName) -> CodecName:
    """The codec of pulled values or, if they are not pulled whole, of their changes: by default that of the pushes.

    `pushed` is the codec of this node's pushes now.
    """
    return pushed if settings.pull_codec == "auto" else settings.pull_codec


def whole_codec(settings: ExchangeSettings, pushed: CodecName) -> WholeCodec:
    """The codec in which this node takes whole values of an owner that sends no changes."""
    codec = pull_codec(settings, pushed)
    return codec if is_whole(codec) else LEAST_LOSSY


def subscribes(settings: ExchangeSettings, pushed: CodecName) -> bool:
    """Whether this node pulls changes."""
    return not is_whole(pull_codec(settings, pushed))


def change_codec(settings: ExchangeSettings, pushed: CodecName) -> CodecName:
    """The codec in which this node, as an owner, encodes changes for those who pull them; one of whole values for none.

    An owner that chose whole values for itself, because its line is fast, still sends changes to those who ask for
    them, because their lines are slow.
    """
    codec = pull_codec(settings, pushed)
    is_chosen = settings.codec == "auto" and settings.pull_codec == "auto"
    return CHANGES if is_chosen and is_whole(codec) else codec
