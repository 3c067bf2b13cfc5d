"""The codec: what is dumped reloads equal; what is wrong is named by its path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipefit.codec import content_digest, dump_text, from_data, load_file, load_text, to_data
from pipefit.errors import FormatError


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    sizes: tuple[int, ...]
    pair: tuple[str, float] = ("a", 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    name: str
    ratio: float
    mode: Literal["fast", "slow"] = "fast"
    inner: Inner
    more: tuple[Inner, ...] = ()
    table: Mapping[str, int] = field(default_factory=dict)
    maybe: int | None = None
    size: int | str = 1
    flag: bool = False
    anything: Mapping[str, Any] = field(default_factory=dict)


inners = st.builds(
    Inner, sizes=st.lists(st.integers(), max_size=5).map(tuple), pair=st.tuples(st.text(), st.floats(0, 9))
)
outers = st.builds(
    Outer,
    name=st.text(),
    ratio=st.floats(allow_nan=False, allow_infinity=False),
    mode=st.sampled_from(["fast", "slow"]),
    inner=inners,
    more=st.lists(inners, max_size=3).map(tuple),
    table=st.dictionaries(st.text(), st.integers(), max_size=3),
    maybe=st.none() | st.integers(),
    size=st.integers() | st.text(),
    flag=st.booleans(),
    anything=st.dictionaries(st.text(), st.integers() | st.text() | st.booleans(), max_size=3),
)


@given(value=outers)
def test_what_is_dumped_reloads_equal(value: Outer) -> None:
    again = load_text(Outer, dump_text(value), "memory")
    assert again == value
    assert content_digest(again) == content_digest(value)


@given(one=outers, two=outers)
def test_digests_differ_where_values_do(one: Outer, two: Outer) -> None:
    assert (content_digest(one) == content_digest(two)) == (to_data(one) == to_data(two))


GOOD = {"name": "x", "ratio": 1, "inner": {"sizes": [1, 2]}}


def test_an_integer_is_a_float_where_one_is_needed() -> None:
    assert from_data(Outer, GOOD, "file").ratio == 1.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nmae": 1}, ["Unknown field 'nmae'", "did you mean 'name'"]),
        ({"ratio": "high"}, ["wrong type", "ratio", '"high"']),
        ({"flag": 1}, ["wrong type", "flag", "bool"]),
        ({"maybe": True}, ["wrong type", "maybe"]),
        ({"mode": "middling"}, ["not one of the choices", "mode", "'fast', 'slow'"]),
        ({"inner": 3}, ["An object is needed", "inner", "fields of Inner"]),
        ({"inner": {"sizes": 3}}, ["A list is needed", "inner.sizes"]),
        ({"inner": {"sizes": [1, "2"]}}, ["wrong type", "inner.sizes[1]"]),
        ({"inner": {"sizes": [], "pair": ["a"]}}, ["wrong length", "inner.pair", "2 entries"]),
        ({"more": [{"sizes": []}, {}]}, ["'sizes' is missing", "more[1]"]),
        ({"table": {"k": 1.5}}, ["wrong type", "table.k"]),
        ({"table": [1]}, ["An object is needed", "table"]),
    ],
)
def test_a_wrong_field_is_named_by_its_path(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(FormatError) as error:
        from_data(Outer, GOOD | change, "file")
    for word in (*words, "file"):
        assert word in str(error.value)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(FormatError, match="'name' is missing"):
        from_data(Outer, {"ratio": 1.0, "inner": {"sizes": []}}, "file")


def test_a_file_cut_short_is_told_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    path.write_text(dump_text(from_data(Outer, GOOD, "file"))[:-20])
    with pytest.raises(FormatError, match="may have been cut short") as error:
        load_file(Outer, path)
    assert "line" in str(error.value) and str(path) in str(error.value)


def test_an_absent_or_binary_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot be read"):
        load_file(Outer, tmp_path / "absent.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="cannot be read"):
        load_file(Outer, tmp_path / "binary.json")


def test_short_lists_stay_on_one_line_for_people() -> None:
    text = dump_text(from_data(Outer, GOOD, "file"))
    assert '"inner": {"sizes": [1, 2], "pair": ["a", 1.0]}' in text
    assert text.endswith("}\n")
