"""The root of all errors that the overlay raises for its callers, and the refusal of the secure channel."""

from __future__ import annotations


class OverlayError(Exception):
    """Something the overlay tried did not work; subclasses carry the facts, and their text is fit for a person."""


class Refused(OverlayError):
    """The secure channel refuses a datagram or a connection. The text is the reason, and the last part of a counter's
    name."""
