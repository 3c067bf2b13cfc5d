"""Read conversations from the rows of jsonl and parquet files.

A row has a list of messages, or a prompt and a completion: two texts, or two lists of messages. Every row is checked
before it is rendered, so that an error names its file and line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipefit.data.sources import STDLIB, has_records, list_paths, read_records
from pipefit.errors import DataError

MESSAGES, PROMPT, COMPLETION, TOOLS, TEXT = "messages", "prompt", "completion", "tools", "text"

ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWERS = "assistant"
"""The role whose messages are answers."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields with the reasoning before an answer, in search order."""

_MESSAGE_FORM = '{"role": "user", "content": "..."}'
_CONTENT_FORM = 'a string, or a list of {"type": "text", "text": "..."}'


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConversation:
    """The messages of one row, as templates take them."""

    where: str
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Any, ...] = ()
    learn_from: int = 0
    "Index of the first message whose answer is learned: the messages of a prompt come before."

    @property
    def answer_indices(self) -> list[int]:
        """The indices of the messages that are answers to learn."""
        return [
            index
            for index, message in enumerate(self.messages)
            if index >= self.learn_from and message["role"] == ANSWERS
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedPrompt:
    """A prompt and its completion as plain texts, without a template."""

    where: str
    prompt: str
    completion: str


ChatRow = ChatConversation | CompletedPrompt


def find_chat_field(sources: Iterable[str], field: str) -> str | None:
    """Return the field with the messages, or PROMPT for rows of prompt and completion; None if the sources are text.

    The first row of the first jsonl or parquet file decides: `field` holds a list, or the row has no field `text` but
    `messages`, or `prompt` and `completion`.
    """
    names = tuple(dict.fromkeys((field, MESSAGES, PROMPT, COMPLETION)))
    for source in sources:
        for path in list_paths(source) if source != STDLIB else ():
            if has_records(path):
                for _, record in read_records(path, names, names):
                    return _chat_field_of(record, field)
    return None


def _chat_field_of(record: Any, field: str) -> str | None:
    if not isinstance(record, dict):
        return None
    if field in record:
        return field if isinstance(record[field], list) else None
    if field != TEXT:
        return field if field == MESSAGES else None
    if MESSAGES in record:
        return MESSAGES
    return PROMPT if PROMPT in record and COMPLETION in record else None


def read_conversations(sources: Iterable[str], field: str, limit_bytes: int | None = None) -> Iterator[ChatRow]:
    """Yield the rows of all sources in order, until their contents exceed `limit_bytes` bytes. `field`: see
    `find_chat_field`.

    Raises DataError for a source that is not jsonl or parquet, and for a row that is not a conversation.
    """
    left = limit_bytes
    for where, record in _chat_records(sources, field):
        row = _parse_row(record, field, where)
        if left is not None:
            left -= content_bytes(row)
            if left < 0:
                return
        yield row


def content_bytes(row: ChatRow) -> int:
    """Return the bytes of the contents of a row."""
    if isinstance(row, CompletedPrompt):
        return len((row.prompt + row.completion).encode())
    return sum(len(message.get("content", "").encode()) for message in row.messages)


def _chat_records(sources: Iterable[str], field: str) -> Iterator[tuple[str, Any]]:
    columns = (PROMPT, COMPLETION) if field == PROMPT else (field,)
    for source in sources:
        for path in list_paths(source) if source != STDLIB else [None]:
            if path is None or not has_records(path):
                raise DataError(
                    "Chat data and plain text cannot be one corpus.",
                    where=str(path or STDLIB),
                    seen="a source that is neither jsonl nor parquet, beside chat data",
                    next_step="name only the files with conversations, for example with 'chat/**/*.jsonl'",
                )
            yield from read_records(path, (*columns, TOOLS), (TOOLS,))


def _parse_row(record: Any, field: str, where: str) -> ChatRow:
    wanted = (PROMPT, COMPLETION) if field == PROMPT else (field,)
    missing = [name for name in wanted if not isinstance(record, dict) or name not in record]
    if missing:
        raise DataError(
            f"There is no field {missing[0]!r}, so this row is not a conversation.",
            where=where,
            seen=", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__,
            allowed=f"{field!r} with a list of {_MESSAGE_FORM}" if field != PROMPT else "'prompt' and 'completion'",
            next_step="remove or mend the row, or name the field with the messages with --field",
        )
    tools = _parse_tools(record.get(TOOLS), where)
    if field == PROMPT:
        return _parse_prompt(record, tools, where)
    return ChatConversation(where=where, messages=_parse_messages(record[field], where), tools=tools)


def _parse_tools(value: Any, where: str) -> tuple[Any, ...]:
    """Return the tools of a row: a list of objects, or its JSON text as parquet files hold it."""
    tools = value
    if isinstance(value, str):
        try:
            tools = json.loads(value or "[]")
        except ValueError:
            tools = value
    if tools is None:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(
            "The tools of the conversation are not a list of objects.",
            where=where,
            seen=repr(value)[:60],
            allowed='a list such as [{"type": "function", "function": {...}}], or its JSON text',
            next_step="remove or mend the field `tools` of the row",
        )
    _require_text(tools, where)
    return tuple(tools)


def _parse_prompt(record: Mapping[str, Any], tools: tuple[Any, ...], where: str) -> ChatRow:
    prompt, completion = record[PROMPT], record[COMPLETION]
    if isinstance(prompt, str) and isinstance(completion, str):
        _require_text((prompt, completion), where)
        return CompletedPrompt(where=where, prompt=prompt, completion=completion)
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise DataError(
            "Prompt and completion are not both texts, or both lists of messages.",
            where=where,
            seen=f"a {type(prompt).__name__} and a {type(completion).__name__}",
            allowed=f"two strings, or two lists of {_MESSAGE_FORM}",
        )
    messages = (*_parse_messages(prompt, f"{where}, prompt"), *_parse_messages(completion, f"{where}, completion"))
    return ChatConversation(where=where, messages=messages, tools=tools, learn_from=len(prompt))


def _parse_messages(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise DataError(
            "This is not a list of messages.",
            where=where,
            seen="an empty list" if value == [] else repr(value)[:60],
            allowed=f"a list of {_MESSAGE_FORM}",
        )
    return tuple(_parse_message(message, f"{where}, message {number}") for number, message in enumerate(value, 1))


def _parse_message(message: Any, where: str) -> Mapping[str, Any]:
    """Return a message without empty fields, its content a string."""
    if not isinstance(message, dict) or "role" not in message:
        raise DataError(
            "This is not a message.",
            where=where,
            seen=repr(message)[:60],
            allowed=_MESSAGE_FORM,
        )
    if message["role"] not in ROLES:
        raise DataError(
            "The role of the message is unknown.",
            where=where,
            seen=repr(message["role"])[:60],
            allowed=", ".join(ROLES),
            next_step="rename the role, for example human to user and gpt to assistant",
        )
    _require_text(message, where)
    fields = _name_reasoning({name: value for name, value in message.items() if value is not None})
    content = fields.get("content")
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        content = "".join(part["text"] for part in content)
    # An answer that only calls tools has no content.
    if not isinstance(content, str) and not (content is None and message["role"] == ANSWERS and len(fields) > 1):
        raise DataError(
            "The content of the message is not text.",
            where=where,
            seen=repr(content)[:60],
            allowed=_CONTENT_FORM,
            next_step="images and other media are not part of chat data: see docs/reference/data.md, Text and images",
        )
    return fields if content is None else fields | {"content": content}


def _name_reasoning(fields: dict[str, Any]) -> dict[str, Any]:
    """Give the reasoning of an answer the names that templates read, as transformers does."""
    reasoning = next((fields[name] for name in REASONING if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _require_text(value: Any, where: str) -> None:
    """Raise DataError for a string inside `value` that is not valid text."""
    if isinstance(value, str):
        if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
            raise DataError(
                "This is not text.",
                where=where,
                seen=repr(value)[:60],
                allowed="Unicode text without NUL characters and lone surrogates",
            )
    elif isinstance(value, Mapping):
        _require_text((*value.keys(), *value.values()), where)
    elif isinstance(value, Sequence):
        for item in value:
            _require_text(item, where)
