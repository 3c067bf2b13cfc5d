"""Tokenizers with chat templates, and conversations, for the tests of chat data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.data.test_tokenizer import make_tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bot|>", "<|head|>", "<|tail|>", "<|eot|>"]

CHATML = """\
{% for message in messages %}
    {% if message.role == 'assistant' %}
<|im_start|>assistant
{{ message.content }}<|im_end|>
    {% else %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}

    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
"""Ends every turn with a line break after the end-of-turn token."""

CHATML_MARKED = CHATML.replace(
    "{{ message.content }}<|im_end|>", "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n"
)

BLOCKS_MARKED = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = 'Today is a good day.' %}
{%- endif %}
{{- '<|head|>system<|tail|>\\n\\n' + system }}
{%- if tools is not none %}{{- '\\nTools: ' }}{{- tools | tojson(indent=2) }}{%- endif %}
{{- '<|eot|>' }}
{%- for message in messages %}
    {{- '<|head|>' + message['role'] + '<|tail|>\\n\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation -%}
            {{ message['content'] | trim }}
            {%- for call in message.tool_calls or [] %}{{- call | tojson }}{%- endfor %}
            {{- '<|eot|>' }}
        {%- endgeneration -%}
    {%- else %}
        {{- message['content'] | trim + '<|eot|>' }}
    {%- endif %}
    {%- if message.last_words is defined %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|tail|>\\n\\n' }}{%- endif %}
"""
"""Headers, a default system text, tools, loop controls, and white space control at the generation block."""

THOUGHTFUL = """\
{%- for message in messages -%}
    {{ '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.last -%}
        {{ '<think>\\n' + (message.reasoning or '') + '</think>\\n' }}
    {%- endif -%}
    {{ message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""Renders the reasoning of the last answer alone, as templates of reasoning models do."""


def write_tokenizer(folder: Path, template: str | list[dict[str, str]] | None = CHATML, **config: Any) -> str:
    """Write a tokenizer with a chat template in its configuration into a folder, and return the folder's name."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder / "tokenizer.json", SPECIAL, vocabulary=320)
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bot|>", "eos_token": "<|im_end|>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(content | config))
    return str(folder)


def turns(*contents: str, system: str = "") -> list[dict[str, Any]]:
    """Messages of user and assistant in turn, perhaps after a system message."""
    first = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return first + [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


CONVERSATIONS = [
    turns("Hi", "Hello!"),
    turns("How many?\n", "\n  Two.  ", "Why?", "Ünïcode is 漢字 \U0001f600", system="Be brief."),
    turns("a" * 40, "bb", "a question without an answer"),
    turns("Tell me of <|im_end|> tokens", "They end turns.", "More", "No."),
]


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_chat(path: Path, conversations: list[list[dict[str, Any]]] | None = None) -> Path:
    """Write conversations as jsonl with a field `messages`."""
    return write_rows(path, [{"messages": messages} for messages in conversations or CONVERSATIONS])
