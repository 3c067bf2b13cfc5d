"""Progress of a search on stderr: a status line on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipefit.plan.evaluate.search_progress import SearchReport

PLAIN_S = 5.0
"""Least seconds between two plain lines of one pass."""

STATUS_S = 0.1
"""Least seconds between two changes of the status line."""


class ProgressLines:
    """Shows the reports of a search. The first line is there at once, before anything is imported or read."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self._status: Any = None
        self._pass_name = ""
        self._next_s = 0.0
        self._compiles = False

    def __enter__(self) -> ProgressLines:
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True).status("")
            self._status.start()
        self.show_text("reading the model")
        return self

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show_text(self, text: str) -> None:
        """Show a text now."""
        if self.quiet:
            return
        if self._status is not None:
            self._status.update(f"{text} ...")
        else:
            print(f"{text} ...", file=sys.stderr, flush=True)

    def show_report(self, report: SearchReport) -> None:
        """Show a report if it begins a pass, or if the last one was long enough ago."""
        now_s = time.monotonic()
        if self.quiet or (report.pass_name == self._pass_name and now_s < self._next_s):
            return
        self._next_s = now_s + (PLAIN_S if self._status is None else STATUS_S)
        self._pass_name = report.pass_name
        self.show_text(report_words(report))

    def show_compilation(self) -> None:
        """Say once that numba compiles. A status line changes soon, so this is a line of its own."""
        if self._compiles or self.quiet:
            return
        self._compiles = True
        text = "compiling the search loops (once on this machine)"
        if self._status is not None:
            self._status.console.print(text)
        else:
            self.show_text(text)


def report_words(report: SearchReport) -> str:
    """Return a report in words, such as `searching layouts: 120 candidates left, 14 simulated, best 1.3 s`."""
    from pipefit.units import format_seconds

    words = []
    if report.left is not None:
        words.append(f"{report.left} candidates left")
    if report.simulated:
        words.append(f"{report.simulated} simulated")
    if report.best_s is not None:
        words.append(f"best {format_seconds(report.best_s)}")
    if report.bound_s is not None:
        words.append(f"lower bound {format_seconds(report.bound_s)}")
    return f"{report.pass_name}: {', '.join(words)}" if words else report.pass_name
