"""A corpus of conversations: their tokens, a mask of the learned tokens, and the end of every conversation.

Beside the token file lie `.mask`, a byte per token, and `.ends`, two int64 per conversation: the number of tokens up to
its end, and its labels. The packing into rows depends on the sequence and is computed when the corpus is opened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pipefit.codec import to_data
from pipefit.data.chat.encode import encode_chat
from pipefit.data.chat.messages import ANSWERS, ChatConversation, content_bytes, read_conversations
from pipefit.data.chat.packing import ConversationRows, Ints, PackedParts, cut_parts, pack_parts
from pipefit.data.chat.template import ChatTemplate, load_template
from pipefit.data.feed_arrays import IGNORE, LEARNED, STARTS
from pipefit.data.prepared import (
    ENDS,
    FORMAT,
    MASK,
    Corpus,
    CorpusRequest,
    PreparedCorpus,
    map_tokens,
    renamed_file,
    require_documents,
    store_corpus,
    token_dtype,
)
from pipefit.data.rows import count_held_out
from pipefit.data.tokenizer import Tokenizer
from pipefit.errors import DataError


class ChatCorpus(Corpus):
    """The rows of a prepared corpus of conversations. A row holds whole conversations, one after another."""

    def __init__(
        self, tokens: NDArray[Any], mask: NDArray[np.uint8], parts: PackedParts, rows: ConversationRows,
        prepared: PreparedCorpus, notes: tuple[str, ...],
    ) -> None:  # fmt: skip
        super().__init__(tokens, rows, prepared)
        self.separator = None
        self._mask, self._parts, self._notes = mask, parts, notes

    def require_separator(self) -> None:
        """Do nothing: documents are marked."""

    def row(self, index: int) -> NDArray[np.int64]:
        """Return (sequence + 1,) token ids, filled with IGNORE (-100) after the last conversation."""
        ids = np.full(self.rows.sequence + 1, IGNORE, dtype=np.int64)
        position = 0
        for start, stop in self._parts.row_parts(index):
            ids[position : position + stop - start] = self._tokens[start:stop]
            position += stop - start
        return ids

    def row_marks(self, index: int) -> NDArray[np.uint8]:
        """Return (sequence + 1,) marks; see RowMarks. The fill after the last conversation is a document."""
        marks = np.zeros(self.rows.sequence + 1, dtype=np.uint8)
        position = 0
        for start, stop in self._parts.row_parts(index):
            marks[position : position + stop - start] = self._mask[start:stop] * LEARNED
            marks[position] = STARTS
            position += stop - start
        marks[position : position + 1] = STARTS
        return marks

    def run_notes(self, documents: str) -> tuple[str, ...]:
        if documents == "apart":
            return self._notes
        return (
            *self._notes,
            "chat data: attention crosses the conversations of a row; plan with --documents apart to keep them apart",
        )


def prepare_chat(request: CorpusRequest, field: str, tokenizer: Tokenizer, folder: Path) -> PreparedCorpus:
    """Write the files of a corpus of conversations into `folder`, unless the same content exists there. `field`: see
    `find_chat_field`.

    Raises DataError if the sources contain no conversations or no answers, or if the template fails.
    """
    scan = _scan_conversations(request, field)
    require_documents(scan.conversations, request.sources)
    template = load_template(request.tokenizer, request.chat_template) if scan.needs_template else None
    if request.loss_on == "answers" and not scan.answers:
        raise _no_answers(request, f"{scan.conversations} rows without a message of the role {ANSWERS!r}")
    digest = scan.corpus_digest(request, tokenizer, template)

    def write_files(path: Path) -> PreparedCorpus:
        dtype = token_dtype(tokenizer)
        rows = read_conversations(request.sources, field, request.limit_bytes)
        encoded = (encode_chat(row, tokenizer, template, request.loss_on) for row in rows)
        with ExitStack() as files:
            paths = (path, Path(f"{path}.{MASK}"), Path(f"{path}.{ENDS}"))
            tokens, labels = _write_arrays(encoded, dtype, *(files.enter_context(renamed_file(path)) for path in paths))
            if not labels:
                raise _no_answers(request, "answers without a token, as the chat template renders them")
        return PreparedCorpus(
            format=FORMAT, file=path.name, dtype=dtype, tokens=tokens, documents=scan.conversations,
            text_bytes=scan.text_bytes, vocabulary=tokenizer.vocabulary, digest=digest, chat=True,
        )  # fmt: skip

    return store_corpus(request, folder, digest, write_files)


def open_chat(
    request: CorpusRequest, prepared: PreparedCorpus, folder: Path, sequence: int, held_out: float
) -> ChatCorpus:
    """Open a prepared corpus of conversations, packed into rows of `sequence` inputs. `held_out`: see `cut_rows`.

    Parts without a label are left out. Raises DataError if all rows are held out.
    """
    mask = np.memmap(folder / f"{prepared.file}.{MASK}", dtype=np.uint8, mode="r", shape=(prepared.tokens,))
    table = np.fromfile(folder / f"{prepared.file}.{ENDS}", dtype=np.int64).reshape(-1, 2)
    starts, stops, labels = _label_parts(mask, table, sequence + 1)
    learned = labels > 0
    parts = pack_parts(starts[learned], stops[learned], labels[learned], sequence + 1)
    label_counts = parts.count_labels()
    where = ", ".join(request.sources)
    rows = ConversationRows(
        count=parts.row_count, sequence=sequence, last_labels=sequence, label_counts=label_counts,
        held_out=count_held_out(parts.row_count, held_out, where),
    )  # fmt: skip
    notes = _packing_notes(table, parts, label_counts, sequence)
    return ChatCorpus(map_tokens(prepared, folder), mask, parts, rows, prepared, notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationScan:
    """The facts of all rows that are known without a template."""

    conversations: int
    answers: int
    needs_template: bool
    text_bytes: int
    content_hash: str

    def corpus_digest(self, request: CorpusRequest, tokenizer: Tokenizer, template: ChatTemplate | None) -> str:
        """Return a hash of the conversations, the tokenizer, the template and the choice of labels."""
        template_digest = template.digest if template is not None else ""
        words = (FORMAT, "chat", self.content_hash, tokenizer.digest, template_digest, request.loss_on)
        return hashlib.sha256(" ".join(map(str, words)).encode()).hexdigest()[:24]


def _scan_conversations(request: CorpusRequest, field: str) -> ConversationScan:
    state = hashlib.sha256()
    count = answers = text_bytes = templated = 0
    for row in read_conversations(request.sources, field, request.limit_bytes):
        content = json.dumps(to_data(replace(row, where="")), sort_keys=True).encode()
        state.update(len(content).to_bytes(8, "little"))
        state.update(content)
        count, text_bytes = count + 1, text_bytes + content_bytes(row)
        templated += isinstance(row, ChatConversation)
        answers += len(row.answer_indices) if isinstance(row, ChatConversation) else 1
    return ConversationScan(
        conversations=count, answers=answers, needs_template=templated > 0, text_bytes=text_bytes,
        content_hash=state.hexdigest(),
    )  # fmt: skip


def _no_answers(request: CorpusRequest, seen: str) -> DataError:
    return DataError(
        "No conversation has an answer to learn.",
        where=", ".join(request.sources),
        seen=seen,
        allowed=f"messages of the role {ANSWERS!r}",
        next_step="check the roles of the messages, or learn all tokens with --loss-on all",
    )


def _write_arrays(
    encoded: Iterable[tuple[Ints, NDArray[np.bool_]]], dtype: str, tokens: BinaryIO, mask: BinaryIO, ends: BinaryIO
) -> tuple[int, int]:
    """Write the arrays of all conversations. Returns the number of tokens and of labels."""
    count = total_labels = 0
    for ids, learned in encoded:
        tokens.write(ids.astype(dtype).tobytes())
        mask.write(learned.astype(np.uint8).tobytes())
        count, labels = count + len(ids), int(learned.sum())
        ends.write(np.array([count, labels], dtype=np.int64).tobytes())
        total_labels += labels
    return count, total_labels


def _label_parts(mask: NDArray[np.uint8], table: Ints, capacity: int) -> tuple[Ints, Ints, Ints]:
    """Return starts, stops and labels of the parts of all conversations. Only conversations that are cut are read."""
    stops = table[:, 0]
    starts = np.concatenate([np.zeros(1, dtype=np.int64), stops[:-1]])
    long = stops - starts > capacity
    cut_starts, cut_stops = cut_parts(starts[long], stops[long], capacity)
    cut_labels = [int(mask[start + 1 : stop].sum()) for start, stop in zip(cut_starts, cut_stops, strict=True)]
    return (
        np.concatenate([starts[~long], cut_starts]),
        np.concatenate([stops[~long], cut_stops]),
        np.concatenate([table[~long, 1], np.array(cut_labels, dtype=np.int64)]),
    )


def _packing_notes(table: Ints, parts: PackedParts, label_counts: Ints, sequence: int) -> tuple[str, ...]:
    lengths = np.diff(table[:, 0], prepend=0)
    filled = float((parts.stops - parts.starts).sum() / (parts.row_count * (sequence + 1)))
    notes = [
        f"chat data: {len(table)} conversations in {parts.row_count} rows, {filled:.1%} filled; "
        f"{int(label_counts.sum())} labels in {parts.row_count * sequence} tokens"
    ]
    too_long, unlabelled = int((lengths > sequence + 1).sum()), int((table[:, 1] == 0).sum())
    if too_long:
        notes.append(f"chat data: conversations longer than {sequence} tokens, cut into parts: {too_long}")
    if unlabelled:
        notes.append(f"chat data: conversations without an answer, left out: {unlabelled}")
    return tuple(notes)
