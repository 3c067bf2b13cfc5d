"""Rows that are conversations, and what is said of rows that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.chat_toys import turns, write_chat, write_rows

from pipefit.data.chat.messages import ChatConversation, CompletedPrompt, find_chat_field, read_conversations
from pipefit.data.chat.template import ChatTemplate
from pipefit.errors import DataError

GOOD = {"messages": turns("a", "b")}


def refusal(path: Path, field: str = "messages") -> str:
    with pytest.raises(DataError) as caught:
        list(read_conversations([str(path)], field))
    return caught.value.full_text()


@pytest.mark.parametrize(
    ("row", "field", "expected"),
    [
        ({"messages": []}, "text", "messages"),
        ({"messages": [], "text": "plain"}, "text", None),
        ({"messages": [], "text": "plain"}, "messages", "messages"),
        ({"chat": []}, "chat", "chat"),
        ({"chat": "plain"}, "chat", None),
        ({"text": "plain"}, "messages", "messages"),
        ({"prompt": "", "completion": ""}, "text", "prompt"),
        ({"prompt": ""}, "text", None),
        ({"text": "plain"}, "text", None),
        ([], "text", None),
    ],
)
def test_the_first_row_decides(tmp_path: Path, row: Any, field: str, expected: str | None) -> None:
    write_rows(tmp_path / "x.jsonl", [row, GOOD])
    (tmp_path / "a.txt").write_text("first, but without rows")
    assert find_chat_field([str(tmp_path)], field) == expected
    assert find_chat_field([str(tmp_path / "a.txt"), "stdlib"], field) is None


def test_conversations_come_in_order_with_their_lines(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    rows = [GOOD, {"messages": [{"role": "user", "content": parts, "name": None}, call], "tools": [{"name": "f"}]}]
    first, second = read_conversations([str(write_rows(tmp_path / "x.jsonl", rows))], "messages")
    assert isinstance(first, ChatConversation) and isinstance(second, ChatConversation)
    assert first.where == f"{tmp_path / 'x.jsonl'}, line 1" and list(first.messages) == GOOD["messages"]
    assert second.messages[0] == {"role": "user", "content": "ab"} and second.tools == ({"name": "f"},)
    assert second.messages[1] == {"role": "assistant", "tool_calls": [{"name": "f"}]}
    assert first.answer_indices == second.answer_indices == [1]
    assert len(list(read_conversations([str(tmp_path)], "messages", limit_bytes=3))) == 1


@pytest.mark.parametrize("tools", [[{"name": "f"}], '[{"name": "f"}]'])
def test_tools_are_objects_or_their_text(tmp_path: Path, tools: Any) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{**GOOD, "tools": tools}])
    (row,) = read_conversations([str(path)], "messages")
    assert isinstance(row, ChatConversation) and row.tools == ({"name": "f"},)


@pytest.mark.parametrize("tools", [5, True, "no JSON", {"name": "f"}, ["f"], '"f"'])
def test_tools_of_another_form_are_named(tmp_path: Path, tools: Any) -> None:
    text = refusal(write_rows(tmp_path / "rows.jsonl", [{**GOOD, "tools": tools}]))
    assert "The tools of the conversation are not a list of objects." in text and "rows.jsonl" in text


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_the_names_that_transformers_gives(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [*turns("a"), {"role": "assistant", "content": "b", name: "hm"}]
    (row,) = read_conversations([str(write_chat(tmp_path / "x.jsonl", [messages]))], "messages")
    assert isinstance(row, ChatConversation)
    source = "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.content }};{% endfor %}"
    (expected,), _ = render_jinja_template([messages], chat_template=source)
    assert (
        ChatTemplate({"default": source}, "", {}).render_chat(row.messages, (), "").text == expected == "||a;hm|hm|b;"
    )


def test_prompts_and_completions_are_texts_or_messages(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "completion": "b"},
        {"prompt": turns("a", "b", "c"), "completion": [{"role": "assistant", "content": "d"}]},
    ]
    text, chat = read_conversations([str(write_rows(tmp_path / "x.jsonl", rows))], "prompt")
    assert text == CompletedPrompt(where=f"{tmp_path / 'x.jsonl'}, line 1", prompt="a", completion="b")
    assert isinstance(chat, ChatConversation) and list(chat.messages) == turns("a", "b", "c", "d")
    assert chat.answer_indices == [3]
    message = refusal(write_rows(tmp_path / "y.jsonl", [{"prompt": "a", "completion": []}]), "prompt")
    assert "not both texts" in message and "seen: a str and a list" in message and "line 1" in message
    assert "There is no field 'completion'" in refusal(write_rows(tmp_path / "y.jsonl", [{"prompt": "a"}]), "prompt")


def test_parquet_gives_the_same_conversations(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    chats = [turns("a", "b"), [{"role": "user", "content": "c", "name": "me"}, {"role": "assistant", "content": "d"}]]
    parquet.write_table(pyarrow.table({"messages": chats, "n": [0, 1]}), tmp_path / "x.parquet")
    assert find_chat_field([str(tmp_path)], "text") == "messages"
    rows = list(read_conversations([str(tmp_path)], "messages"))
    assert [list(row.messages) for row in rows if isinstance(row, ChatConversation)] == chats
    assert rows[1].where == f"{tmp_path / 'x.parquet'}, row 1"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "plain"}, ("There is no field 'messages'", "seen: 'text'", "remove or mend the row")),
        ("plain", ("There is no field 'messages'", "seen: str")),
        ({"messages": "plain"}, ("not a list of messages", "seen: 'plain'", '"role": "user"')),
        ({"messages": []}, ("not a list of messages", "seen: an empty list")),
        ({"messages": ["Hi"]}, ("This is not a message", "message 1", "seen: 'Hi'")),
        ({"messages": [{"content": "Hi"}]}, ("This is not a message", "message 1")),
        (
            {"messages": [*turns("a"), {"role": "gpt", "content": "Hi"}]},
            ("The role of the message is unknown", "message 2", "seen: 'gpt'", "system, developer, user, assistant"),
        ),
        ({"messages": [{"role": "user", "content": 3}]}, ("content of the message is not text", "seen: 3")),
        ({"messages": [{"role": "assistant", "content": None}]}, ("content of the message is not text", "seen: None")),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            ("content of the message is not text", '{"type": "text", "text": "..."}', "Text and images"),
        ),
        ({"messages": turns("a\0b")}, ("This is not text", "message 1", "without NUL")),
        ({"messages": turns("\ud800")}, ("This is not text", "message 1", "surrogates")),
        ({"messages": [{"role": "assistant", "tool_calls": [{"x": "\0"}]}]}, ("This is not text", "message 1")),
    ],
)
def test_a_row_that_is_no_conversation_is_named(tmp_path: Path, row: Any, words: tuple[str, ...]) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, (GOOD, row))))
    message = refusal(path)
    assert f"{path}, line 2" in message and all(word in message for word in words), message


def test_plain_text_beside_conversations_is_refused(tmp_path: Path) -> None:
    write_chat(tmp_path / "a.jsonl")
    (tmp_path / "readme.md").write_text("plain")
    message = refusal(tmp_path)
    assert "cannot be one corpus" in message and "readme.md" in message and "'chat/**/*.jsonl'" in message
