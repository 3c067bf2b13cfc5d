"""Ids and learned tokens of conversations: those of transformers, and those that a person would mark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.chat_toys import (
    BLOCKS_MARKED,
    CHATML,
    CHATML_MARKED,
    CONVERSATIONS,
    THOUGHTFUL,
    turns,
    write_tokenizer,
)

from pipefit.data.chat.encode import encode_chat
from pipefit.data.chat.messages import ChatConversation, CompletedPrompt
from pipefit.data.chat.template import load_template
from pipefit.data.tokenizer import load_tokenizer
from pipefit.errors import DataError

TOOLS = [{"type": "function", "function": {"name": "clock", "description": "it's <b>", "parameters": {}}}]


def encoded(
    folder: str, messages: list[dict[str, Any]], loss_on: Any = "answers", **fields: Any
) -> tuple[list[int], list[int]]:
    """(ids, 1 for each learned id)."""
    row = ChatConversation(where="here", messages=tuple(messages), **fields)
    ids, learned = encode_chat(row, load_tokenizer(folder), load_template(folder), loss_on)
    return ids.tolist(), learned.astype(int).tolist()


def learned_texts(folder: str, messages: list[dict[str, Any]], **fields: Any) -> list[str]:
    """The runs of learned tokens as text."""
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(f"{folder}/tokenizer.json")
    ids, learned = encoded(folder, messages, **fields)
    texts, run = [], []
    for token, label in [*zip(ids, learned, strict=True), (0, 0)]:
        if label:
            run.append(token)
        elif run:
            texts.append(library.decode(run, skip_special_tokens=False))
            run = []
    return texts


def test_a_conversation_may_begin_with_an_answer(tmp_path: Path) -> None:
    """The template reads the first message, so no text exists before it."""
    folder = write_tokenizer(tmp_path, "{% if messages[0]['role'] == 'tool' %}tool {% endif %}" + CHATML)
    messages = [{"role": "assistant", "content": "Hello!"}, *turns("Hi", "Good day")]
    assert learned_texts(folder, messages) == ["Hello!<|im_end|>", "Good day<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML_MARKED, BLOCKS_MARKED], ids=["chatml", "blocks"])
@pytest.mark.parametrize("number", range(len(CONVERSATIONS)))
def test_ids_and_masks_are_those_of_transformers(tmp_path: Path, template: str, number: int) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path, template)
    library = transformers.AutoTokenizer.from_pretrained(folder)
    expected = library.apply_chat_template(
        CONVERSATIONS[number], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, learned = encoded(folder, CONVERSATIONS[number])
    assert ids == expected["input_ids"]
    assert learned == expected["assistant_masks"] and 0 < sum(learned) < len(learned)
    everything, labels = encoded(folder, CONVERSATIONS[number], "all")
    assert everything == ids and labels == [0] + [1] * (len(ids) - 1)


def test_tools_and_their_calls_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path, BLOCKS_MARKED)
    call = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "ü"}}}
    messages = [
        {"role": "user", "content": "The time?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "12:00"},
        {"role": "assistant", "content": "Noon.", "last_words": True},
        {"role": "user", "content": "left out by break"},
    ]
    library = transformers.AutoTokenizer.from_pretrained(folder)
    expected = library.apply_chat_template(
        messages, tools=TOOLS, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert encoded(folder, messages, tools=tuple(TOOLS)) == (expected["input_ids"], expected["assistant_masks"])


def test_a_named_template_for_tools_is_used_for_rows_with_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": BLOCKS_MARKED}]
    folder = write_tokenizer(tmp_path / "named", named)
    plain, tools = write_tokenizer(tmp_path / "plain", CHATML), write_tokenizer(tmp_path / "tools", BLOCKS_MARKED)
    assert encoded(folder, CONVERSATIONS[0]) == encoded(plain, CONVERSATIONS[0])
    assert encoded(folder, CONVERSATIONS[0], tools=tuple(TOOLS)) == encoded(tools, CONVERSATIONS[0], tools=tuple(TOOLS))


def test_a_template_file_comes_before_the_configuration(tmp_path: Path) -> None:
    folder, marked = write_tokenizer(tmp_path / "a", "wrong"), write_tokenizer(tmp_path / "b", CHATML)
    (tmp_path / "a" / "chat_template.jinja").write_text(CHATML)
    assert encoded(folder, CONVERSATIONS[1]) == encoded(marked, CONVERSATIONS[1])
    assert load_template(f"{folder}/tokenizer.json").digest == load_template(folder).digest


@pytest.mark.parametrize("number", range(len(CONVERSATIONS)))
def test_answers_are_located_as_if_the_template_had_marked_them(tmp_path: Path, number: int) -> None:
    plain, marked = write_tokenizer(tmp_path / "plain", CHATML), write_tokenizer(tmp_path / "marked", CHATML_MARKED)
    assert encoded(plain, CONVERSATIONS[number]) == encoded(marked, CONVERSATIONS[number])


def test_located_answers_end_with_the_token_that_ends_their_turn(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, CHATML)
    assert learned_texts(folder, CONVERSATIONS[0]) == ["Hello!<|im_end|>"]
    assert learned_texts(folder, CONVERSATIONS[2]) == ["bb<|im_end|>"]
    assert learned_texts(folder, CONVERSATIONS[3]) == ["They end turns.<|im_end|>", "No.<|im_end|>"]
    assert learned_texts(folder, turns("no answer")) == []
    assert learned_texts(folder, [{"role": "assistant", "content": "I begin."}]) == ["I begin.<|im_end|>"]
    prompt = "{% if add_generation_prompt %}assistant: {% endif %}"
    folder = write_tokenizer(tmp_path, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + prompt)
    assert learned_texts(folder, turns("a", "b", "c", "d")) == ["b\n", "d\n"], "no token ends a turn"


def test_answers_are_located_where_earlier_ones_lose_their_reasoning(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, THOUGHTFUL)
    messages = turns("one", "1 ", "two", "2")
    messages[1]["reasoning"], messages[3]["reasoning"] = "hm\n", "so\n"
    assert learned_texts(folder, messages) == ["1 <|im_end|>", "<think>\nso\n</think>\n2<|im_end|>"]


def test_answers_are_located_where_the_prompt_opens_the_reasoning(tmp_path: Path) -> None:
    prompt = "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}"
    folder = write_tokenizer(tmp_path, THOUGHTFUL.rpartition("{%- if")[0] + prompt)
    messages = turns("one", "<1", "two", "2")
    assert learned_texts(folder, messages) == ["<1<|im_end|>", "</think>\n2<|im_end|>"]


def test_answers_are_located_where_the_conversation_has_an_end_of_its_own(tmp_path: Path) -> None:
    end = "{% if not add_generation_prompt and messages[-1].role == 'assistant' %}{{ eos_token }}{% endif %}"
    folder = write_tokenizer(tmp_path, CHATML + end, eos_token="<|endoftext|>")
    answers = ["b<|im_end|>", "d<|im_end|>\n<|endoftext|>"]
    assert learned_texts(folder, turns("a", "b", "c", "d")) == answers
    assert learned_texts(folder, turns("a", "b", "c")) == answers[:1]


def test_answers_that_cannot_be_located_name_the_message(tmp_path: Path) -> None:
    depends = "{% for m in messages %}{{ messages | length }}{{ m.role }}{{ m.content }}{% endfor %}"
    folder = write_tokenizer(tmp_path, depends)
    with pytest.raises(DataError, match="An answer cannot be located") as caught:
        encoded(folder, turns("a", "b", "c"))
    text = caught.value.full_text()
    assert "here, message 2" in text and f"{folder}/tokenizer_config.json" in text
    assert "{% generation %}" in text and "--chat-template FILE" in text
    assert encoded(folder, turns("a", "b", "c"), "all")[1].count(0) == 1
    grows = "{% if not add_generation_prompt and messages | length == 2 %}!{% endif %}"
    folder = write_tokenizer(tmp_path, "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}" + grows)
    with pytest.raises(DataError, match="An answer cannot be located"):
        encoded(folder, turns("a", "b", "c"))


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED], ids=["plain", "marked"])
def test_answers_of_a_prompt_are_not_learned(tmp_path: Path, template: str) -> None:
    folder = write_tokenizer(tmp_path, template)
    assert learned_texts(folder, turns("a", "b", "c", "d"), learn_from=3) == ["d<|im_end|>"]
    assert learned_texts(folder, turns("a", "b", "c", "d"), learn_from=2) == ["d<|im_end|>"]


@pytest.mark.parametrize("tokenizer", ["bytes", "file"])
def test_a_completion_is_learned_with_the_end_of_text(tmp_path: Path, tokenizer: str) -> None:
    name = "bytes" if tokenizer == "bytes" else write_tokenizer(tmp_path, None)
    library = load_tokenizer(name)
    row = CompletedPrompt(where="here", prompt="Frage: wörter? ", completion="ja, ü")
    ids, learned = encode_chat(row, library, None, "answers")
    assert ids.tolist() == library.encode(b"Frage: w\xc3\xb6rter? ja, \xc3\xbc").tolist()
    prompt = len(ids) - int(learned.sum())
    assert learned.tolist() == [False] * prompt + [True] * (len(ids) - prompt)
    assert np.array_equal(ids[:prompt], library.encode_offsets(row.prompt)[0]), "the completion begins a token"
    assert encode_chat(row, library, None, "all")[1].sum() == len(ids) - 1
