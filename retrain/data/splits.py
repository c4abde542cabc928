"""Which split a scenario family belongs to: decided by its name alone, so that no later source or run moves it."""

from __future__ import annotations

import hashlib
from typing import Literal, get_args

Split = Literal["train", "calibrate", "gate", "anchor", "test"]

SPLITS: tuple[Split, ...] = get_args(Split)
SHARES: dict[Split, float] = {"train": 0.60, "calibrate": 0.08, "gate": 0.10, "anchor": 0.07, "test": 0.15}

_SALT = "558"
"""Chosen, by sizes alone, so that every source comes near the shares in all five splits."""


def split_of(source: str, family: str) -> Split:
    """The split of a family; families fall into splits at random in the shares of ``SHARES``."""
    digest = hashlib.sha256(f"{_SALT}\0{source}\0{family}".encode()).digest()
    place = int.from_bytes(digest[:8]) / 2**64
    for split, share in SHARES.items():
        place -= share
        if place < 0:
            return split
    return "test"
