"""Counter-based Gumbel noise: the coupling that makes a sampled answer independent of drafter and block length."""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor

_LARGEST_BELOW_ONE = 1 - 2**-24


def noise_key(seed: int, choice: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys, as signed integers, for the token at an absolute position of one choice."""
    digest = hashlib.blake2b(struct.pack("<QqQ", seed % 2**64, choice, position), digest_size=8).digest()
    low, high = struct.unpack("<ii", digest)
    return low, high


def gumbel(key: tuple[int, int], vocab_size: int, device: torch.device | None = None) -> Tensor:
    """Standard Gumbel noise, float32 [vocab_size], a function of the key and the token id alone.

    Each token id is mixed twice with lowbias32 (Wellons, "Prospecting for Hash Functions", 2018), once under either
    half of the key, and the 32 bits are taken as a uniform whose precision is finest where the exponential is smallest.
    """
    x = torch.arange(vocab_size, dtype=torch.int32, device=device) * -1640531527 + key[0]
    x = _mix(_mix(x) ^ key[1])
    uniform = ((x.long() & 0xFFFFFFFF).float() + 0.5) * 2**-32
    return uniform.clamp_(max=_LARGEST_BELOW_ONE).neg_().log1p_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    x = x ^ (x >> 16 & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15 & 0x1FFFF)
    x = x * -2073254261
    return x ^ (x >> 16 & 0xFFFF)
