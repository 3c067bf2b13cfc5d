"""Token ids of conversations, and the tokens with a label.

The whole text is tokenised once: special tokens of the template become single ids, and no further ones are added. A
token with at least one character of an answer is learned.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipefit.data.chat.answers import find_answers
from pipefit.data.chat.messages import ChatRow, CompletedPrompt
from pipefit.data.chat.template import ChatTemplate
from pipefit.data.prepared import LossOn
from pipefit.data.tokenizer import Tokenizer
from pipefit.layout import Run


def encode_chat(
    row: ChatRow, tokenizer: Tokenizer, template: ChatTemplate | None, loss_on: LossOn
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return (ids, whether each is learned). The first token has no token before it, and is never learned.

    A completed prompt ends with the tokenizer's end-of-text token. Conversations have the tokens of their template
    alone. Raises DataError if the template fails.
    """
    if isinstance(row, CompletedPrompt):
        text, runs = row.prompt + row.completion, [(len(row.prompt), len(row.prompt) + len(row.completion))]
    else:
        assert template is not None, "conversations are rendered by a template"
        if loss_on == "all":
            text, runs = template.render_chat(row.messages, row.tools, row.where).text, []
        else:
            text, runs = find_answers(template, row, tokenizer.special_tokens)
    ids, offsets = tokenizer.encode_offsets(text)
    learned = np.ones(len(ids), dtype=np.bool_) if loss_on == "all" else overlapping_tokens(offsets, runs)
    if isinstance(row, CompletedPrompt) and tokenizer.separator is not None:
        ids, learned = np.append(ids, tokenizer.separator), np.append(learned, True)
    learned[:1] = False
    return ids, learned


def overlapping_tokens(offsets: NDArray[np.int64], runs: Sequence[Run]) -> NDArray[np.bool_]:
    """Return whether each token has a character in a run. `offsets`: first character and end of each token."""
    learned = np.zeros(len(offsets), dtype=np.bool_)
    for start, stop in runs:
        learned |= (offsets[:, 0] < stop) & (offsets[:, 1] > start)
    return learned
