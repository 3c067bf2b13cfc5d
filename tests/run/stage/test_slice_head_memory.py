"""The head's worst moment shrinks with the slice: by the allocator's record, in bytes."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.token_slices import head_memory


def test_logits_of_a_slice_are_all_that_the_head_holds(monkeypatch, capsys, tmp_path):
    """Two tensors of logits (they and their gradient) and less than a tenth of one beside them, whatever the cut; the
    planner counts the same. The command's own numbers."""
    path = tmp_path / "memory.json"
    monkeypatch.setattr(sys, "argv", ["head_memory.py", "--quick", "--json", str(path)])
    assert head_memory.main() == 0
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [row["slices"] for row in rows] == [1, 2, 4, 8, 16]
    whole, fixed = rows[0], 8192
    for row in rows:
        assert row["logits_bytes"] * row["slices"] == whole["logits_bytes"]
        assert 2 * row["logits_bytes"] <= row["peak_bytes"] <= 2.1 * row["logits_bytes"]
        assert abs(row["peak_bytes"] * row["slices"] - whole["peak_bytes"]) <= row["slices"] * fixed
    assert "share" in capsys.readouterr().out


def test_in_bfloat16_too():
    sizes = {"rows": 2, "tokens": 128, "width": 16, "vocabulary": 2048, "counts": (1, 4)}
    rows = head_memory.head_peaks(**sizes, dtype="bfloat16")["rows"]
    assert rows[1]["share"] == pytest.approx(0.25, rel=0.05)
