"""Helpers that write HTML. All text from files is escaped here, and nowhere else."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any


def escape_text(value: object) -> str:
    """Escape the value so that it cannot be markup."""
    return html.escape(str(value), quote=True)


def html_table(
    caption: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numeric: Sequence[int] = (),
    stack: bool = False,
) -> str:
    """Return a table whose cells are already HTML. `numeric` lists the right-aligned columns.

    The first cell of a row is its heading. A table that is too wide scrolls sideways in its own box. With `stack` it
    becomes a list of cards on a phone, and the ARIA roles keep its structure.
    """

    def table_cell(column: int, content: str) -> str:
        mark = ' class="number"' if column in numeric else ""
        name = f' data-label="{escape_text(heads[column])}"' if stack else ""
        if column == 0:
            return f'<th scope="row" role="rowheader"{mark}{name}>{content}</th>'
        return f'<td role="cell"{mark}{name}>{content}</td>'

    head = "".join(
        f'<th scope="col" role="columnheader"{" class=number" if i in numeric else ""}>{escape_text(name)}</th>'
        for i, name in enumerate(heads)
    )
    body = "".join(
        f'<tr role="row">{"".join(table_cell(i, content) for i, content in enumerate(row))}</tr>' for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape_text(caption)}">'
        f'<table role="table"{" class=stack" if stack else ""}><caption>{escape_text(caption)}</caption>'
        f'<thead role="rowgroup"><tr role="row">{head}</tr></thead><tbody role="rowgroup">{body}</tbody></table></div>'
    )


def embed_json(data: Any) -> str:
    """Encode as JSON that is safe inside a <script> element: no `<`, and no NaN or infinity."""
    plain = json.dumps(_finite_data(data), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        plain = plain.replace(character, f"\\u{ord(character):04x}")
    return plain


def _finite_data(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {str(key): _finite_data(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite_data(value) for value in data]
    return data
