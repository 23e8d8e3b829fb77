"""The error with which the secure channel refuses a datagram or a connection."""

from __future__ import annotations

from p2pnode.overlay.errors import OverlayError


class Refused(OverlayError):
    """The text is the reason, and the last part of a counter's name."""
