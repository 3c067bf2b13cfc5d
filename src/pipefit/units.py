"""Parsing and formatting of seconds, bytes and FLOPs at the user interface, the only place of unit conversion.

Inside the project every number carries its unit in its name: `_s`, `_bytes`, `_bytes_per_s`, `flops`,
`_flops_per_s`. Decimal prefixes are powers of 1000 (kB, MB, Gbit/s), binary prefixes powers of 1024 (KiB, MiB, GiB).
"""

from __future__ import annotations

import re

from pipefit.errors import PipefitError

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "d": 86400.0}
_COUNTS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_NUMBER = re.compile(r"^\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-zµ/]*)\s*$")


def parse_bytes(text: str | int | float, where: str = "size") -> int:
    """Parse bytes from `80GB`, `80 GiB`, `512` (bytes) or a number. Raises PipefitError for any other text."""
    if isinstance(text, (int, float)):
        return int(text)
    value, unit = _split_unit(text, where, "80GB or 80GiB")
    scale = _byte_scale(unit, "B")
    if scale is None:
        raise _bad_unit(text, where, "B, kB, MB, GB, TB, KiB, MiB, GiB, TiB")
    return round(value * scale)


def parse_bandwidth(text: str | int | float, where: str = "bandwidth") -> float:
    """Parse bytes per second from `25Gbit/s`, `3GB/s`, `3 GiB/s` or a number. Raises PipefitError for other text."""
    if isinstance(text, (int, float)):
        return float(text)
    value, unit = _split_unit(text, where, "25Gbit/s or 3GB/s")
    for suffix, base, factor in (("bit/s", "", 0.125), ("bps", "", 0.125), ("B/s", "", 1.0)):
        if unit.endswith(suffix):
            scale = _byte_scale(unit.removesuffix(suffix), base)
            if scale is not None:
                return value * scale * factor
    raise _bad_unit(text, where, "Mbit/s, Gbit/s, Tbit/s, MB/s, GB/s, GiB/s")


def parse_seconds(text: str | int | float, where: str = "time") -> float:
    """Parse seconds from `5us`, `3.2 ms`, `1s` or a number. Raises PipefitError for any other text."""
    if isinstance(text, (int, float)):
        return float(text)
    value, unit = _split_unit(text, where, "5us or 3.2ms")
    if unit not in _SECONDS:
        raise _bad_unit(text, where, ", ".join(_SECONDS))
    return value * _SECONDS[unit]


def parse_count(text: str | int | float, where: str = "count") -> float:
    """Parse a number of tokens from `1.5T`, `4M`, `300 B` or a number. Raises PipefitError for any other text."""
    if isinstance(text, (int, float)):
        return float(text)
    value, unit = _split_unit(text, where, "1.5T or 4M")
    if unit not in _COUNTS:
        raise _bad_unit(text, where, ", ".join(filter(None, _COUNTS)))
    if value * _COUNTS[unit] == float("inf"):
        raise PipefitError("This number is too large.", where=where, seen=repr(text), allowed="for example 1.5T or 4M")
    return value * _COUNTS[unit]


def format_bytes(count: float) -> str:
    """Return bytes as `1.50 GiB`: three significant figures in binary units, as memory tools print them."""
    sign, count = ("-", -count) if count < 0 else ("", count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{sign}{_three_digits(count)} {unit}"
        count /= 1024
    return f"{sign}{_three_digits(count)} TiB"


def format_seconds(seconds: float) -> str:
    """Return seconds as `3.21 ms`: three significant figures in the fitting unit."""
    sign, seconds = ("-", -seconds) if seconds < 0 else ("", seconds)
    if seconds >= 120:
        return f"{sign}{_three_digits(seconds / 60)} min"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{sign}{_three_digits(seconds / scale)} {unit}"
    return f"{sign}{_three_digits(seconds / 1e-9)} ns" if seconds else "0 s"


def format_bandwidth(bytes_per_s: float) -> str:
    """Return a bandwidth as `3.12 GB/s`, in decimal units as links are sold and measured."""
    return f"{_format_decimal(bytes_per_s)}B/s"


def format_flops(flops: float) -> str:
    """Return FLOPs as `312 TFLOP`."""
    return f"{_format_decimal(flops)}FLOP"


def format_count(count: float) -> str:
    """Return a count of parameters or tokens as `8.03 B` (K, M, B, T)."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= scale:
            return f"{_three_digits(count / scale)} {unit}"
    return f"{count:g}"


def _format_decimal(value: float) -> str:
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{_three_digits(value / scale)} {prefix}"
    return f"{_three_digits(value)} "


def _three_digits(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _split_unit(text: str, where: str, example: str) -> tuple[float, str]:
    match = _NUMBER.match(text)
    if match is None:
        raise PipefitError(
            "This is not a number with a unit.",
            where=where,
            seen=repr(text),
            allowed=f"for example {example}",
        )
    return float(match[1]), match[2]


def _byte_scale(unit: str, base: str) -> float | None:
    prefix = unit.removesuffix(base) if base else unit
    return _DECIMAL.get(prefix, _BINARY.get(prefix))


def _bad_unit(text: str, where: str, allowed: str) -> PipefitError:
    return PipefitError("The unit is unknown.", where=where, seen=repr(text), allowed=allowed)
