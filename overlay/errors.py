"""The root of all errors that the overlay raises for its callers."""

from __future__ import annotations


class OverlayError(Exception):
    """Something the overlay tried did not work; subclasses carry the facts, and their text is fit for a person."""
