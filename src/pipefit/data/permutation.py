"""A shuffle as a pure function of a key: a bijection of range(count) that is computed, not stored.

A balanced Feistel network permutes the smallest square power of two that is at least `count`. Values that fall outside
are mapped again until they fall inside ("cycle walking", Black and Rogaway, "Ciphers with arbitrary finite domains",
CT-RSA 2002). The round function is the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). It is a shuffle, not
a cipher.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_MASK = (1 << 64) - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def permute_indices(indices: NDArray[np.int64], count: int, key: int) -> NDArray[np.int64]:
    """Map each index by the permutation of range(count) under `key`; the result has the same shape, int64.

    Time and memory grow with the number of indices, not with `count`. `key` is any 64-bit integer (see `make_key`).
    """
    assert count > 0, "a permutation of nothing"
    values = np.asarray(indices, dtype=np.int64)
    assert values.size == 0 or (values.min() >= 0 and values.max() < count), "an index outside range(count)"
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    keys = [make_key(key, round_) for round_ in range(_ROUNDS)]
    result = _feistel_rounds(values.astype(np.uint64), half_bits, keys)
    outside = result >= np.uint64(count)
    while outside.any():
        result[outside] = _feistel_rounds(result[outside], half_bits, keys)
        outside = result >= np.uint64(count)
    return result.astype(np.int64)


def make_key(*parts: int) -> int:
    """Return a 64-bit key from integers; their order and number matter."""
    state = len(parts)
    for part in parts:
        state = _mix_bits((state + _GOLDEN + (part & _MASK)) & _MASK)
    return state


def _mix_bits(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _feistel_rounds(values: NDArray[np.uint64], half_bits: int, keys: list[int]) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix_array(right + np.uint64(key & (_MASK >> 1))) & mask)
    return (left << shift) | right


def _mix_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))
