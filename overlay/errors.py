"""The base class of the errors that the overlay raises for its callers, and the error of `overlay.sealing`."""

from __future__ import annotations


class OverlayError(Exception):
    """An operation of the overlay failed. Subclasses carry the details as attributes; the text is for people."""


class Refused(OverlayError):
    """A received datagram or connection did not pass a check of `overlay.sealing`, and is dropped.

    The text is the reason, as one word. The name of the counter ends with that word, as in `seal_dropped_stranger`.
    """
