"""Chat templates: which is read, and what is said when it is missing or fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.support.chat_toys import CHATML, turns, write_tokenizer

from pipefit.data.chat.template import ChatTemplate, load_template
from pipefit.errors import DataError


def refusal(tokenizer: str, file: str = "") -> str:
    with pytest.raises(DataError) as caught:
        load_template(tokenizer, file).render_chat(turns("a", "b"), (), "rows.jsonl, line 3")
    return caught.value.full_text()


def rendered(source: str) -> str:
    template = ChatTemplate({"default": source}, "there", {"eos_token": "<e>"})
    return template.render_chat(turns("a", "b"), (), "here").text


def test_templates_have_the_functions_of_transformers() -> None:
    assert rendered("{{ strftime_now('%d %b %Y') }}") == "26 Jul 2024", "the same on every day"
    assert rendered("{{ {'b': 'ü<', 'a': [1]} | tojson }}") == '{"b": "ü<", "a": [1]}'
    assert rendered("{{ eos_token }}{{ bos_token }}{{ tools is none }}") == "<e>True"
    assert rendered("  {% for m in messages %}\n{{ m.content }}{% break %}{% endfor %}") == "a"
    assert rendered("{%- generation %} x {% endgeneration -%}  y{%generation-%} z {%-endgeneration%}") == " x yz"


def test_a_named_file_replaces_the_template(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, "of the tokenizer")
    (tmp_path / "mine.jinja").write_text("mine {{ eos_token }}")
    assert load_template(folder).render_chat(turns("a"), (), "").text == "of the tokenizer"
    mine = load_template(folder, str(tmp_path / "mine.jinja"))
    assert (
        mine.render_chat(turns("a"), (), "").text == "mine <|im_end|>" and mine.digest != load_template(folder).digest
    )
    assert "cannot be read" in refusal(folder, str(tmp_path / "none.jinja"))
    (tmp_path / "mine.jinja").write_bytes(b"\xff")
    assert "cannot be read" in refusal(folder, str(tmp_path / "mine.jinja"))


def test_special_tokens_may_be_objects(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, "{{ bos_token }}", bos_token={"content": "<b>", "special": True})
    assert load_template(folder).render_chat(turns("a"), (), "").text == "<b>"


def test_a_missing_template_names_the_files_that_may_hold_it(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, None)
    message = refusal(folder)
    assert "The tokenizer has no chat template" in message and f"where: {folder}" in message
    assert "in the field chat_template of tokenizer_config.json" in message and "--chat-template FILE" in message
    write_tokenizer(tmp_path, [{"name": "rag", "template": CHATML}])
    assert "no default template" in refusal(folder)
    (tmp_path / "tokenizer_config.json").unlink()
    assert "no chat_template.jinja, and no tokenizer_config.json" in refusal(folder)
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert "The tokenizer's configuration cannot be read" in refusal(folder)
    message = refusal("bytes")
    assert "Chat data need a tokenizer" in message and "seen: bytes" in message and "--tokenizer DIR" in message


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for %}", ("The chat template is not valid Jinja", "line 1")),
        ("\n{% generation %}x", ("The chat template is not valid Jinja", "line 2")),
        ("{{ raise_exception('Roles must alternate') }}", ("refuses this conversation", "seen: Roles must alternate")),
        ("{{ messages[7].content.x }}", ("refuses this conversation", "has no element 7")),
        ("{{ messages.append(1) }}", ("refuses this conversation", "unsafe")),
        ("{{ 1 + 'a' }}", ("refuses this conversation", "unsupported operand")),
    ],
)
def test_a_template_that_fails_is_named(tmp_path: Path, source: str, words: tuple[str, ...]) -> None:
    folder = write_tokenizer(tmp_path, source)
    message = refusal(folder)
    assert all(word in message for word in (*words, "tokenizer_config.json")), message
    assert ("rows.jsonl, line 3" in message) == ("refuses" in message)


def test_without_jinja_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tokenizer(tmp_path, CHATML)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setitem(sys.modules, "jinja2.sandbox", None)
    message = refusal(folder)
    assert "need Jinja2, which is not installed" in message and "pip install 'pipefit[run]'" in message
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"] == CHATML
