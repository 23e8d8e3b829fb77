"""The root of all errors that training raises for its callers."""

from __future__ import annotations


class TrainingError(Exception):
    """Something training tried did not work; subclasses carry the facts, and their text is fit for a person."""
