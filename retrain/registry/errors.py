"""What goes wrong with drafter versions and the serving pointer, in words for the person who has to mend it."""

from __future__ import annotations


class RegistryError(Exception):
    """The registry or the pointer cannot do what was asked; the message says why and what to do."""


class UnknownVersion(RegistryError):
    """No version has such an id."""
