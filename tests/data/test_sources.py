"""Text from every kind of source, in a fixed order, and what is said when a source is no text."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from pathlib import Path

import pytest

from pipefit.data.sources import SourceDocument, read_documents
from pipefit.errors import DataError


def texts(*sources: str | Path, **options: object) -> list[str]:
    return [d.text.decode() for d in read_documents([str(s) for s in sources], **options)]  # type: ignore[arg-type]


def refusal(*sources: str | Path, **options: object) -> str:
    with pytest.raises(DataError) as caught:
        texts(*sources, **options)
    return caught.value.full_text()


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/b/c.py", ".hidden", ".git/config", "__pycache__/x.py", "Z.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"in {name}")
    assert texts(tmp_path) == ["in Z.txt", "in a/b/c.py", "in a/z.md", "in b.txt"]
    assert texts(tmp_path / "b.txt", tmp_path / "a") == ["in b.txt", "in a/b/c.py", "in a/z.md"]
    assert texts(f"{tmp_path}/**/*.txt") == ["in Z.txt", "in b.txt"]


def test_jsonl_gives_its_field_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "one", "n": 1}\n\n{"text": "zwei ü"}\n{"text": ""}\n', encoding="utf-8")
    assert texts(path) == ["one", "zwei ü"]
    path.write_text('{"body": "a\\nb"}')
    assert texts(path, field="body") == ["a\nb"]


def test_parquet_gives_its_column(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    path = tmp_path / "x.parquet"
    values = [f"row {i}" for i in range(100)]
    parquet.write_table(pyarrow.table({"n": list(range(100)), "text": values}), path, row_group_size=7)
    assert texts(path) == values
    message = refusal(path, field="body")
    assert "There is no column 'body'." in message and "'n', 'text'" in message
    assert "The field 'n' is not text." in refusal(path, field="n")
    path.write_bytes(path.read_bytes()[:-20])
    message = refusal(path)
    assert "cannot be read as parquet" in message and str(path) in message


def test_parquet_without_pyarrow_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    message = refusal(tmp_path / "x.parquet")
    assert "needs pyarrow" in message and "pip install 'pipefit[parquet]'" in message


def test_the_standard_library_is_read_whole_and_nothing_else() -> None:
    documents = list(read_documents(["stdlib"]))
    names = [document.where.removeprefix("stdlib:") for document in documents]
    assert names == sorted(names) and len(names) > 300
    assert {"abc.py", "json/decoder.py", "typing.py"} <= set(names)
    assert not [name for name in names if "site-packages" in name or "/test/" in name or not name.endswith(".py")]
    folder = Path(sysconfig.get_paths()["stdlib"])
    assert documents[names.index("abc.py")] == SourceDocument("stdlib:abc.py", (folder / "abc.py").read_bytes())


def test_the_limit_cuts_at_a_character(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("12345")
    (tmp_path / "b").write_text("üü", encoding="utf-8")
    (tmp_path / "c").write_text("never")
    assert texts(tmp_path, limit_bytes=8) == ["12345", "ü"]
    assert texts(tmp_path, limit_bytes=5) == ["12345"]
    assert texts(tmp_path, limit_bytes=6) == ["12345"]
    assert texts(tmp_path) == ["12345", "üü", "never"]


@pytest.mark.parametrize(
    ("content", "offset", "shown"),
    [
        (b"text, then \x00\x01", 11, r"b'\x00\x01'"),
        (b"\x89PNG\r\n", 0, r"b'\x89PNG\r\n'"),
        (b"caf\xe9 in latin-1", 3, "b'\\xe9 in"),
        (b"cut \xc3", 4, r"b'\xc3'"),
    ],
)
def test_a_binary_file_is_named_with_the_offset(tmp_path: Path, content: bytes, offset: int, shown: str) -> None:
    (tmp_path / "fine.txt").write_text("fine")
    (tmp_path / "other.bin").write_bytes(content)
    message = refusal(tmp_path)
    assert "This is not text." in message
    assert f"{tmp_path / 'other.bin'}, byte {offset}" in message
    assert shown in message and "pattern" in message


def test_a_missing_source_is_named() -> None:
    message = refusal("/no/such/place")
    assert "There is no such file or folder of text." in message and "/no/such/place" in message
    assert "'stdlib'" in message


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    (tmp_path / "x").chmod(0)
    assert "The file cannot be read." in refusal(tmp_path / "x")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut sho', "The line is not valid JSON."),
        ('{"body": "x"}', "There is no field 'text'."),
        ('["text"]', "There is no field 'text'."),
        ('{"text": 3}', "The field 'text' is not text."),
        ('{"text": null}', "The field 'text' is not text."),
        (json.dumps({"text": "a\0b"}), "This is not text."),
        ('{"text": "\\ud800"}', "This is not text."),
    ],
)
def test_a_bad_line_of_jsonl_is_named_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "good"}\n\n' + line + "\n")
    said = refusal(tmp_path / "x.jsonl")
    assert message in said and f"{tmp_path / 'x.jsonl'}, line 3" in said
