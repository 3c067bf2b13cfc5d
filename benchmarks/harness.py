"""The harness of all benchmarks: arguments, exit codes, progress, tables, and results with their provenance.

def main() -> int:
    parser = benchmark_parser(__doc__, quick="two small cases")
    parser.add_argument("--steps", type=int, default=4, help="steps of each plan that count")
    return run_benchmark(parser, measure_all)

def measure_all(arguments: Namespace) -> Outcome:
    ...
    return Outcome({"rows": rows}, passed=all(row["met"] for row in rows))
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.provenance import module_name, provenance
from pipefit.errors import FormatError, PipefitError

RESULT_FOLDER = Path(__file__).parent / "results"

RESULTS = "a file that a benchmark wrote with --json, such as those in benchmarks/results"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a benchmark."""

    result: Mapping[str, Any] | None = None
    "JSON data without provenance, which the harness adds; None if there is nothing to write, or nothing more."
    passed: bool = True
    "Whether all targets were reached: exit code 0, else 1."


def benchmark_parser(text: str | None, *, quick: str, only: Iterable[str] = ()) -> argparse.ArgumentParser:
    """Return a parser with `--quick` and `--json`, and with `--only` for one of several parts.

    `text` is the program's docstring; `quick` says what a quick run measures.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module_name()}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    if only:
        parser.add_argument("--only", choices=tuple(only), help="this part only; others stay in an earlier result")
    parser.add_argument("--json", metavar="PATH", help="write the result to this file")
    return parser


def run_benchmark(parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], Outcome]) -> int:
    """Parse the command line, measure, and write the result with the provenance of the start.

    Returns the exit code: 0, 1 if a target was missed, 2 if a PipefitError was raised, which is printed to stderr.
    """
    arguments = parser.parse_args()
    origin = provenance()
    try:
        outcome = measure(arguments)
    except PipefitError as error:
        print(f"{module_name()}: {error.full_text()}", file=sys.stderr)
        return 2
    if outcome.result is not None:
        write_result(arguments.json, {"provenance": origin, **outcome.result})
    return 0 if outcome.passed else 1


def write_result(path: str | Path | None, result: Mapping[str, Any]) -> None:
    """Write a result as JSON, if a path was asked for."""
    if path is not None:
        Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def read_result(path: str | Path) -> dict[str, Any]:
    """Return the result in a file. Raises FormatError if there is no such file, or if it is no JSON object."""
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError("A result cannot be read.", where=str(path), seen=error, allowed=RESULTS) from None
    if not isinstance(result, dict):
        raise FormatError("A result is no JSON object.", where=str(path), seen=type(result).__name__, allowed=RESULTS)
    return result


def earlier_result(path: str | Path | None) -> dict[str, Any]:
    """Return the result that a benchmark would overwrite; empty if there is none."""
    return read_result(path) if path is not None and Path(path).is_file() else {}


def keep_others(parts: Mapping[str, Any], earlier: Mapping[str, Any], order: Iterable[str]) -> dict[str, Any]:
    """Return newly measured parts beside the other parts of an earlier result, in the given order."""
    known = {**earlier, **parts}
    return {name: known[name] for name in order if name in known}


def report_progress(label: str) -> Callable[[int, int], None]:
    """Return a function of (done, total) that prints every tenth of the work to stderr."""
    last = -1

    def report(done: int, total: int) -> None:
        nonlocal last
        if 10 * done // total != last:
            last = 10 * done // total
            print(f"{label}: {done} of {total} visits", file=sys.stderr, flush=True)

    return report


class TextTable:
    """A table of fixed columns, printed row by row while a benchmark measures: (title, alignment and width) each."""

    def __init__(self, *columns: tuple[str, str], indent: str = "") -> None:
        self.columns, self.indent = columns, indent

    def print_head(self) -> None:
        """Print the titles."""
        self.print_row(*(title for title, _ in self.columns))

    def print_row(self, *cells: Any, note: str = "") -> None:
        """Print one row, with a note behind its last column."""
        texts = (f"{cell!s:{width}}" for cell, (_, width) in zip(cells, self.columns, strict=True))
        print((self.indent + "".join(texts) + note).rstrip(), flush=True)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "---") -> str:
    """Return a Markdown table; `align` is the rule below every column but the first."""
    lines = [head, ["---"] + [align] * (len(head) - 1), *rows]
    return "\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines)


def format_table(columns: str, rows: Iterable[Sequence[str]], align: str = "---") -> str:
    """Return a Markdown table; `columns` holds the titles, with ` | ` between them."""
    return markdown_table(columns.split(" | "), rows, align)


def load_result(name: str) -> Any:
    """Return the data of a committed result file."""
    return read_result(RESULT_FOLDER / f"{name}.json")
