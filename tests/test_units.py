"""Units: what people write is read, what is wrong is quoted."""

from __future__ import annotations

import pytest

from pipefit.errors import PipefitError
from pipefit.units import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_flops,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [("80GB", 80_000_000_000), ("80 GiB", 85_899_345_920), ("1.5kB", 1500), ("512", 512), ("3 MiB", 3_145_728), (7, 7)],
)
def test_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "rate"),
    [("200Gbit/s", 25e9), ("25 GB/s", 25e9), ("1GiB/s", 2**30), ("100Mbps", 12.5e6), ("8bit/s", 1.0), (3.5, 3.5)],
)
def test_bandwidth(text: str, rate: float) -> None:
    assert parse_bandwidth(text) == rate


@pytest.mark.parametrize(("text", "seconds"), [("5us", 5e-6), ("3.2 ms", 3.2e-3), ("2min", 120.0), ("1h", 3600.0)])
def test_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-15)


@pytest.mark.parametrize(
    ("call", "text", "words"),
    [
        (parse_bytes, "80 GX", "The unit is unknown"),
        (parse_bytes, "lots", "not a number with a unit"),
        (parse_bandwidth, "25 G", "The unit is unknown"),
        (parse_bandwidth, "fast", "not a number with a unit"),
        (parse_seconds, "5 fortnights", "The unit is unknown"),
        (parse_seconds, "-5s", "not a number with a unit"),
    ],
)
def test_mistakes_are_quoted_with_what_is_allowed(call: object, text: str, words: str) -> None:
    with pytest.raises(PipefitError, match=words) as error:
        call(text, "some field")  # type: ignore[operator]
    assert repr(text) in str(error.value) and "some field" in str(error.value) and "allowed" in str(error.value)


def test_printing_keeps_three_figures() -> None:
    assert format_bytes(1.5 * 2**30) == "1.50 GiB"
    assert format_bytes(-3 * 2**20) == "-3.00 MiB"
    assert format_bytes(900) == "900 B"
    assert format_bytes(5 * 2**40) == "5.00 TiB"
    assert format_seconds(0.00321) == "3.21 ms"
    assert format_seconds(7200) == "120 min"
    assert format_seconds(2.5e-8) == "25.0 ns"
    assert format_seconds(0) == "0 s"
    assert format_bandwidth(25e9) == "25.0 GB/s"
    assert format_flops(312e12) == "312 TFLOP"
    assert format_count(8.03e9) == "8.03 B"
    assert format_count(12) == "12"
