"""Random numbers independent of the layout: a hash of an element's identity instead of a generator with state.

The mask of dropout at (row, token, feature) of a layer in a step is a pure function of (seed, step, layer, operator in
the layer, row of the step, token's position, feature), so replicas, slices, stages and shards that hold the same
element draw the same number. Rows and tokens go through the 64-bit finalizer of SplitMix64 (Steele et al., 2014),
features through the 32-bit one of MurmurHash3 (Appleby). All of it is integer arithmetic on tensors.
"""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix_key(*numbers: int) -> int:
    """Return a 64-bit key (as a signed integer) from plain integers, in order."""
    key = 0
    for number in numbers:
        key = _mix_int((key + _GOLDEN + (number & _MASK)) & _MASK)
    return _as_signed(key)


def token_bits(key: int, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return int32 (B, T): bits for every token from its row of the step (B,) and its position (B, T), both int64."""
    by_row = _mix_64(rows + key).unsqueeze(1)
    return _mix_64(by_row + (positions + 1) * _as_signed(_GOLDEN)).to(torch.int32)


def feature_bits(start: int, count: int, device: torch.device) -> torch.Tensor:
    """Return int32 (count,): bits for features start, start + 1, ..."""
    return _mix_32(torch.arange(start + 1, start + 1 + count, dtype=torch.int32, device=device) * 0x61C88647)


def numbered_feature_bits(features: torch.Tensor) -> torch.Tensor:
    """Return int32: the bits of features by their numbers (int64), equal to `feature_bits` for a contiguous run."""
    return _mix_32((features + 1).to(torch.int32) * 0x61C88647)


def keep_mask(tokens: torch.Tensor, features: torch.Tensor, p: float) -> torch.Tensor:
    """Return bool (B, T, D): True for a kept element, with probability 1 - p (to 24 bits)."""
    bits = _mix_32(tokens.unsqueeze(-1) ^ features)
    return (bits & 0xFFFFFF) >= round(p * (1 << 24))


def _mix_64(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _as_signed(_FIRST)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _as_signed(_SECOND)
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def _mix_32(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ ((x >> 16) & 0xFFFF)) * -0x7A143595
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -0x3D4D51CB
    return x ^ ((x >> 16) & 0xFFFF)


def _mix_int(z: int) -> int:
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)


def _as_signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
