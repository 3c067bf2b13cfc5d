"""A ratchet on names and words: counts of `tests/support/word_gauge.py` may only fall.

`tests/word_counts.json` holds the lowest share of each fault so far. A share that is clearly higher fails. So does a
share that is clearly lower: then `python -m tests.test_words` writes the lower one, to be committed with the change.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.support.word_gauge import (
    count_names,
    count_pronouns,
    count_prose,
    iterate_comments,
    iterate_docstrings,
    iterate_messages,
)

ROOT = Path(__file__).resolve().parents[1]
COUNTS = ROOT / "tests" / "word_counts.json"
SLACK = 0.02
"""A share may be higher than the recorded one by this part of it: a new page or class moves all shares a little. Counts
of functions and classes are exact."""
LOWER = 0.1
"""A share that is lower by more than this part of it is recorded."""


def measured_shares() -> dict[str, float]:
    """Return the share of each fault in the source, its messages and comments, and the documentation, as it stands."""
    files = sorted((ROOT / "src").rglob("*.py"))
    names = asdict(count_names(files))
    shares = {
        "one-word function names": names["one_word_functions"] / names["functions"],
        "one-word class names": names["one_word_classes"] / names["classes"],
        "class names defined twice": names["repeated_classes"],
        "filler locals": names["filler_locals"] / names["locals"],
        "functions of more than 7 parameters": names["many_parameters"],
        "functions of more than 15 branches": names["complex_functions"],
    }
    pages = [path.read_text(encoding="utf-8") for path in [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]]
    for title, texts in (("docstrings", list(iterate_docstrings(files))), ("docs", pages)):
        prose = asdict(count_prose(texts))
        shares[f"{title}: words a sentence"] = prose["words"] / prose["sentences"]
        shares[f"{title}: sentences over 30 words"] = prose["long_sentences"] / prose["sentences"]
        shares[f"{title}: clause-first sentences"] = prose["clause_first"] / prose["sentences"]
        shares[f"{title}: clause pronouns per 100 words"] = 100 * prose["pronouns"] / prose["words"]
    for title, iterate_texts in (("messages", iterate_messages), ("comments", iterate_comments)):
        shares[f"{title}: clause pronouns per 100 words"] = count_pronouns(list(iterate_texts(files)))
    return {name: share if isinstance(share, int) else round(share, 4) for name, share in shares.items()}


def test_names_and_words_do_not_get_worse() -> None:
    recorded = json.loads(COUNTS.read_text(encoding="utf-8"))
    measured = measured_shares()
    assert measured.keys() == recorded.keys()
    slack = {name: 0.0 if isinstance(share, int) else SLACK for name, share in measured.items()}
    worse = {
        name: (recorded[name], share) for name, share in measured.items() if share > recorded[name] * (1 + slack[name])
    }
    assert not worse, f"(recorded, measured) shares that rose, see docs/reference/glossary.md: {worse}"
    better = {name: (recorded[name], share) for name, share in measured.items() if share < recorded[name] * (1 - LOWER)}
    assert not better, f"shares that fell: run `python -m tests.test_words` and commit the file: {better}"


def test_the_gauge_counts_each_fault(tmp_path: Path) -> None:
    source = tmp_path / "sample.py"
    source.write_text(
        '"""What this is for is a clause that comes first."""\n'
        "class Box:\n    pass\nclass TallBox:\n    pass\n"
        "def cut():\n    found = 1\n    total = 2\n    return found, total\n"
        "def cut_layers(a, b, c, d, e, f, g, h):\n    return a\n"
    )
    names = count_names([source])
    assert (names.functions, names.one_word_functions, names.many_parameters) == (2, 1, 1)
    assert (names.classes, names.one_word_classes, names.repeated_classes) == (2, 1, 0)
    assert (names.locals, names.filler_locals, names.complex_functions) == (2, 1, 0)
    prose = count_prose(
        [*iterate_docstrings([source]), "The planner counts what it needs. Then " + "word " * 31 + "end."]
    )
    assert (prose.sentences, prose.clause_first, prose.pronouns, prose.long_sentences) == (3, 1, 1, 1)


def test_the_gauge_counts_messages_and_comments(tmp_path: Path) -> None:
    source = tmp_path / "sample.py"
    source.write_text(
        '"""Return what the docstring says of it."""\n'
        "# noqa: E501 what a directive says\n"
        "#: The comment says what it does.\n"
        "value = 1\n"
        "'A string below a field says what it is.'\n"
        "short = 'what is four words'\n"
        "markup = '<p class=\"a\">what a template of a page shows</p>'\n"
        "error = ('This stage needs ' f'{value} of those that '\n         'another stage holds.')\n"
        "nested = f'{\"the rest of the devices\"} idle'\n",
        encoding="utf-8",
    )
    messages = list(iterate_messages([source]))
    assert messages == ["This stage needs X of those that another stage holds.", "the rest of the devices"]
    assert count_pronouns(messages) == pytest.approx(100 * 1 / 15)
    assert list(iterate_comments([source])) == [": The comment says what it does."]
    assert count_pronouns(list(iterate_comments([source]))) == pytest.approx(100 / 7)
    assert count_pronouns([]) == 0.0


if __name__ == "__main__":
    earlier = json.loads(COUNTS.read_text(encoding="utf-8"))
    lowest = {name: min(share, earlier.get(name, share)) for name, share in measured_shares().items()}
    COUNTS.write_text(json.dumps(lowest, indent=1) + "\n", encoding="utf-8")
