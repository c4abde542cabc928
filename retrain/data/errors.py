"""What goes wrong with training data."""

from __future__ import annotations


class DataError(Exception):
    """Training data cannot be made, written or read; the message says what to do."""
