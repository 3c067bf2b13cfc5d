"""Chat templates: Jinja2 templates of Hugging Face tokenizers, which render messages to text.

The template is the file `chat_template.jinja` beside the tokenizer, or the field `chat_template` of its
tokenizer_config.json. Blocks of `{% generation %}` mark answers: their text is wrapped in two control strings during
rendering, which are then removed. Templates have the functions and filters of the transformers library.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from pipefit.data.tokenizer import BYTES
from pipefit.errors import DataError
from pipefit.extras import install_command

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of templates: the usual one, and the one for rows with tools if there is one."""

CURRENT_DATE = datetime.datetime(2024, 7, 26)
"""The date of `strftime_now`: fixed, so that equal data give equal tokens on every host and day."""

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BEGIN, _END = "\0<", "\0>"
"""Control strings around an answer. NUL is not part of text."""

_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_RAISED = "raise_exception"


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The text of a conversation, and the runs of characters in generation blocks."""

    text: str
    answers: tuple[tuple[int, int], ...]


class ChatTemplate:
    """The templates of a tokenizer by name, and the special tokens that they may use."""

    def __init__(self, sources: Mapping[str, str], where: str, special_tokens: Mapping[str, str]) -> None:
        """Raises DataError if Jinja2 is missing or a template is not valid."""
        self._where, self._special_tokens = where, dict(special_tokens)
        self._marks = {name: bool(_GENERATION.search(source)) for name, source in sources.items()}
        self.digest = hashlib.sha256(json.dumps([dict(sources), self._special_tokens]).encode()).hexdigest()[:16]
        environment = _make_environment(where)
        self._templates = {name: _compile_source(environment, text, where) for name, text in sources.items()}

    def marks_answers(self, tools: Sequence[Any]) -> bool:
        """Return whether the template for these tools has generation blocks."""
        return self._marks[self._choose_name(tools)]

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], where: str, *, prompts: bool = False
    ) -> RenderedChat:
        """Return the text of these messages; with `prompts` followed by the beginning of an answer.

        Raises DataError if the template fails.
        """
        template = self._templates[self._choose_name(tools)]
        try:
            text = template.render(
                messages=[dict(message) for message in messages],
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=prompts,
                **self._special_tokens,
            )
        except Exception as error:  # templates are programs: any error is theirs
            raise self.template_error(
                "The chat template refuses this conversation.", where, str(error) or type(error).__name__
            ) from None
        return _split_marks(text)

    def template_error(self, what: str, where: str, seen: str, next_step: str | None = None) -> DataError:
        """Build the error for a conversation that the template does not fit."""
        return DataError(what, where=f"{where}, by {self._where}", seen=seen, next_step=next_step)

    def _choose_name(self, tools: Sequence[Any]) -> str:
        return TOOL_USE if tools and TOOL_USE in self._templates else DEFAULT


class TemplateFolder:
    """The files of a tokenizer that concern chat."""

    def __init__(self, tokenizer: str) -> None:
        path = Path(tokenizer).expanduser()
        self.folder = path if path.is_dir() else path.parent

    @cached_property
    def tokenizer_config(self) -> Mapping[str, Any]:
        """The content of tokenizer_config.json; empty if there is none. Raises DataError if it is not JSON."""
        path = self.folder / CONFIG_FILE
        if not path.is_file():
            return {}
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError("The tokenizer's configuration cannot be read.", where=str(path), seen=error) from None
        return config if isinstance(config, dict) else {}

    def special_tokens(self) -> dict[str, str]:
        """Return the special tokens by the names that templates use."""
        values = {name: self.tokenizer_config.get(name) for name in _SPECIAL}
        texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    def template_sources(self) -> tuple[str, dict[str, str]]:
        """Return (file, template by name). Raises DataError if the tokenizer has no template."""
        path = self.folder / TEMPLATE_FILE
        if path.is_file():
            return str(path), {DEFAULT: _read_template(path)}
        stored = self.tokenizer_config.get("chat_template")
        if isinstance(stored, str):
            return str(self.folder / CONFIG_FILE), {DEFAULT: stored}
        if isinstance(stored, list):
            named = {entry["name"]: entry["template"] for entry in stored if {"name", "template"} <= entry.keys()}
            if DEFAULT in named:
                return str(self.folder / CONFIG_FILE), named
        seen = f"no {TEMPLATE_FILE}, and no {CONFIG_FILE}"
        if self.tokenizer_config:
            seen = f"no {TEMPLATE_FILE}, and no default template in the field chat_template of {CONFIG_FILE}"
        raise DataError(
            "The tokenizer has no chat template.",
            where=str(self.folder),
            seen=seen,
            next_step=f"copy {TEMPLATE_FILE} or {CONFIG_FILE} of an instruction-tuned model to this folder, or name a "
            "template with --chat-template FILE",
        )


def load_template(tokenizer: str, file: str = "") -> ChatTemplate:
    """Load the template in `file`; empty: the template of the tokenizer.

    Raises DataError if there is none, if it is not valid, or for the tokenizer of bytes.
    """
    if tokenizer == BYTES:
        raise DataError(
            "Chat data need a tokenizer.",
            where="--tokenizer",
            seen=BYTES,
            allowed=f"a folder with tokenizer.json and a chat template ({TEMPLATE_FILE} or {CONFIG_FILE})",
            next_step="add --tokenizer DIR, the folder of the model's tokenizer",
        )
    folder = TemplateFolder(tokenizer)
    where, sources = (file, {DEFAULT: _read_template(Path(file))}) if file else folder.template_sources()
    return ChatTemplate(sources, where, folder.special_tokens())


def _read_template(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(
            "The chat template cannot be read.", where=str(path), seen=error, allowed="a Jinja template as text"
        ) from None


def _make_environment(where: str) -> Any:
    """Return a sandboxed environment with the functions and filters of chat templates."""
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise DataError(
            "Chat templates need Jinja2, which is not installed.",
            where=where,
            next_step=f"{install_command('jinja2')}, or pip install jinja2",
        ) from None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.filters["mark_answer"] = lambda text: f"{_BEGIN}{text}{_END}"
    environment.globals[_RAISED] = _raise_exception
    environment.globals["strftime_now"] = CURRENT_DATE.strftime
    return environment


def _compile_source(environment: Any, source: str, where: str) -> Any:
    """Compile a template. A generation block becomes a filter block, which wraps its text in the control strings."""
    from jinja2 import TemplateSyntaxError

    def to_filter(match: re.Match[str]) -> str:
        left, end, right = match.groups()
        return f"{{%{left} {'endfilter' if end else 'filter mark_answer'} {right}%}}"

    try:
        return environment.from_string(_GENERATION.sub(to_filter, source))
    except TemplateSyntaxError as error:
        raise DataError(
            "The chat template is not valid Jinja.", where=f"{where}, line {error.lineno}", seen=error.message
        ) from None


def _split_marks(text: str) -> RenderedChat:
    """Remove the control strings from a rendered text."""
    parts = re.split(f"({_BEGIN}|{_END})", text)
    plain, answers, size, begin = [], [], 0, 0
    for part in parts:
        if part == _BEGIN:
            begin = size
        elif part == _END:
            answers.append((begin, size))
        else:
            plain.append(part)
            size += len(part)
    return RenderedChat("".join(plain), tuple(answers))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise ValueError(message)
