"""What goes wrong with training, in words for the person who has to mend it."""

from __future__ import annotations


class TrainingError(Exception):
    """A run cannot begin or go on; the message says why and what to do."""


class Stopped(TrainingError):
    """A run was asked to stop, and has saved what it takes to go on."""
