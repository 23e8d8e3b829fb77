"""Why a sealed datagram is not accepted."""

from __future__ import annotations

from overlay.errors import OverlayError


class Refused(OverlayError):
    """A datagram that is not let in; the text is the reason, fit for a counter's name."""
