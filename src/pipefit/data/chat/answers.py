"""Find the answers in the text of a conversation.

A template with generation blocks marks them. For any other template the conversation is also rendered in parts: the
answer of message i lies between the text of the messages before it, with the prompt for an answer, and the text of the
messages up to it. Both are beginnings of the whole text, unless the template renders a message differently once further
ones follow, or opens the reasoning in its prompt. Then a placeholder instead of the content shows the text before and
after it: the answer begins where that text leaves the prompt, and ends with the text that follows the content both
here and at the end of a conversation.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.data.chat.messages import ChatConversation
from pipefit.data.chat.template import ChatTemplate
from pipefit.errors import DataError
from pipefit.layout import Run

_PLACEHOLDER = "\0[content]"


def find_answers(
    template: ChatTemplate, conversation: ChatConversation, special_tokens: Sequence[str]
) -> tuple[str, list[Run]]:
    """Return the text of a conversation and the runs of characters of its answers, end-of-turn tokens included.

    White space after an end-of-turn token, one of `special_tokens`, is not part of an answer. Raises DataError if the
    template fails, or if its answers cannot be located.
    """
    finder = AnswerFinder(template, conversation, special_tokens)
    if not template.marks_answers(conversation.tools):
        runs = [finder.locate_answer(index) for index in conversation.answer_indices]
        return finder.text, [_trim_answer(finder.text, run, special_tokens) for run in runs]
    runs = list(finder.marked)
    if conversation.learn_from and conversation.answer_indices:
        start = finder.answer_start(conversation.answer_indices[0])
        runs = [run for run in runs if run[0] >= start]
    return finder.text, runs


class AnswerFinder:
    """The text of one conversation, and its comparison with the texts of parts of it."""

    def __init__(self, template: ChatTemplate, conversation: ChatConversation, special_tokens: Sequence[str]) -> None:
        self._template, self._conversation, self._special_tokens = template, conversation, special_tokens
        rendered = template.render_chat(conversation.messages, conversation.tools, conversation.where)
        self.text, self.marked = rendered.text, rendered.answers

    def locate_answer(self, index: int) -> Run:
        """Return the characters of the answer in message `index`."""
        start = self.answer_start(index)
        through = self._render_part(index + 1)
        stop = len(through) if self.text.startswith(through) else self._stop_by_placeholder(index)
        if stop is None or stop < start:
            raise self._unlocated(index, "the text of the messages up to it is not the beginning of the whole text")
        return start, stop

    def answer_start(self, index: int) -> int:
        """Return the first character of the answer in message `index`."""
        count = len(self._conversation.messages)
        if not index:  # templates need a message before the prompt for an answer
            around = self._around_placeholder(index, count)
            if around is not None and self.text.startswith(around[0]):
                return len(around[0])
        prompt = self._render_part(index, prompts=True)
        if self.text.startswith(prompt):
            return len(prompt)
        around = self._around_placeholder(index, count)
        shared = _shared_beginning(prompt, around[0]) if around is not None else ""
        if not shared or not shared.startswith(self._render_part(index)) or not self.text.startswith(shared):
            raise self._unlocated(index, "the text that prompts for it is not the beginning of the whole text")
        return len(shared)

    def _stop_by_placeholder(self, index: int) -> int | None:
        """Return the end of an answer: of the text that follows its content both in the whole conversation and in one
        that ends with it. None if these texts do not share the end of the turn."""
        in_all = self._around_placeholder(index, len(self._conversation.messages))
        at_end = self._around_placeholder(index, index + 1)
        if in_all is None or at_end is None or not self.text.endswith(in_all[1]):
            return None
        shared = _shared_beginning(in_all[1], at_end[1])
        if shared != at_end[1]:
            ends = [shared.rfind(token) + len(token) for token in self._special_tokens if token in shared]
            if not ends:
                return None
            shared = shared[: max(ends)]
        return len(self.text) - len(in_all[1]) + len(shared)

    def _around_placeholder(self, index: int, count: int) -> tuple[str, str] | None:
        """Return the text before and after the content of message `index` in the first `count` messages."""
        messages = list(self._conversation.messages[:count])
        messages[index] = {**messages[index], "content": _PLACEHOLDER}
        text = self._template.render_chat(messages, self._conversation.tools, self._conversation.where).text
        parts = text.split(_PLACEHOLDER)
        return (parts[0], parts[1]) if len(parts) == 2 else None

    def _render_part(self, count: int, *, prompts: bool = False) -> str:
        conversation = self._conversation
        return self._template.render_chat(
            conversation.messages[:count], conversation.tools, conversation.where, prompts=prompts
        ).text

    def _unlocated(self, index: int, seen: str) -> DataError:
        return self._template.template_error(
            "An answer cannot be located in the text of the chat template.",
            f"{self._conversation.where}, message {index + 1}",
            seen,
            "mark the answers in a copy of the template with {% generation %} and {% endgeneration %}, and name it "
            "with --chat-template FILE; or learn all tokens with --loss-on all",
        )


def _shared_beginning(first: str, second: str) -> str:
    pairs = zip(first, second, strict=False)
    length = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    return first[:length]


def _trim_answer(text: str, run: Run, special_tokens: Sequence[str]) -> Run:
    stripped = text[run[0] : run[1]].rstrip()
    ends_turn = any(stripped.endswith(token) for token in special_tokens)
    return (run[0], run[0] + len(stripped)) if ends_turn else run
