"""Small helpers that write HTML: everything that comes from a file is escaped here, and nowhere else."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any


def text(value: object) -> str:
    """The value as text that cannot be markup."""
    return html.escape(str(value), quote=True)


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: Sequence[int] = ()) -> str:
    """A table whose cells are HTML already. `numeric` names the columns that are set to the right.

    The first cell of a row is its heading. The table scrolls sideways in its own box where it is too wide.
    """

    def cell(tag: str, column: int, content: str, scope: str = "") -> str:
        mark = ' class="number"' if column in numeric else ""
        return f"<{tag}{mark}{scope}>{content}</{tag}>"

    head = "".join(cell("th", i, text(name), ' scope="col"') for i, name in enumerate(heads))
    body = "".join(
        "<tr>"
        + "".join(
            cell("th", i, content, ' scope="row"') if i == 0 else cell("td", i, content)
            for i, content in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}"><table>'
        f"<caption>{text(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def embed(data: Any) -> str:
    """JSON that can stand inside a <script> element: no `<`, and nothing that is not a number."""
    plain = json.dumps(_finite(data), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for bad, good in (
        ("<", "\\u003c"),
        (">", "\\u003e"),
        ("&", "\\u0026"),
        ("\u2028", "\\u2028"),
        ("\u2029", "\\u2029"),
    ):
        plain = plain.replace(bad, good)
    return plain


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return data
