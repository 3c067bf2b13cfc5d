"""The file of a memory correction: the recorded runs, and the correction learned from them for each device kind."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipefit.codec import dump_text, load_file, write_file
from pipefit.cost.memory.correction import (
    LEAST_CONFIGURATIONS,
    PEAK_PARTS,
    MemoryCorrection,
    MemoryRun,
    learn_correction,
)
from pipefit.errors import ClusterError, FormatError


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """Measured runs, and the corrections of device kinds with enough runs."""

    format: Literal["pipefit-memory"] = "pipefit-memory"
    version: Literal[1] = 1
    runs: tuple[MemoryRun, ...] = ()
    corrections: Mapping[str, MemoryCorrection] = field(default_factory=dict)
    "By device kind."


def load_memory(path: Path) -> MemoryFacts:
    """Load a memory file. Raises FormatError if it is not one, or if a number in it is impossible."""
    facts = load_file(MemoryFacts, path)
    for kind, correction in facts.corrections.items():
        if not _is_usable(correction):
            raise FormatError(
                "The memory correction is invalid.",
                where=f"{path}: corrections.{kind}",
                seen=f"spread {correction.spread:g}, {len(correction.errors)} errors, "
                f"coefficients of {', '.join(sorted(correction.coefficients)) or 'nothing'}",
                allowed=f"finite numbers: a coefficient for each of {', '.join(PEAK_PARTS)}, none below 0, one above, "
                f"their {len(PEAK_PARTS)} x {len(PEAK_PARTS)} matrix, a spread, errors and a range above 0",
                next_step="remove `corrections` and run `pipefit verify PLAN --record` on the file to learn them again",
            )
    for index, run in enumerate(facts.runs):
        if not (
            set(run.parts) == set(PEAK_PARTS)
            and all(math.isfinite(size) and size >= 0 for size in run.parts.values())
            and 0 < run.measured_bytes < math.inf
        ):
            raise FormatError(
                "The recorded run is invalid.",
                where=f"{path}: runs[{index}]",
                seen=f"{run.measured_bytes:g} bytes measured, parts {', '.join(sorted(run.parts))}",
                allowed=f"more than 0 bytes, and the parts {', '.join(PEAK_PARTS)}, none below 0",
            )
    return facts


def _is_usable(correction: MemoryCorrection) -> bool:
    """Return whether estimates can be made with these numbers."""
    coefficients, matrix = correction.coefficients, correction.precision
    smallest, largest = correction.range_bytes
    numbers = [*coefficients.values(), *correction.errors, correction.spread, largest, *itertools.chain(*matrix)]
    return (
        all(map(math.isfinite, numbers))
        and set(coefficients) == set(PEAK_PARTS)
        and min(coefficients.values()) >= 0 < max(coefficients.values())
        and [len(row) for row in matrix] == [len(PEAK_PARTS)] * len(PEAK_PARTS)
        and bool(correction.errors)
        and correction.spread > 0
        and 0 < smallest <= largest
    )


def record_runs(path: Path, runs: Sequence[MemoryRun]) -> MemoryFacts:
    """Add runs to a file, which is created if missing, and learn the corrections again.

    New runs replace earlier runs of the same configuration, kind and rank.
    """
    before = load_memory(path).runs if path.exists() else ()
    new = {(run.configuration, run.kind, run.rank) for run in runs}
    earlier = [run for run in before if (run.configuration, run.kind, run.rank) not in new]
    facts = learn_facts((*earlier, *runs))
    write_file(path, dump_text(facts), "memory file", ClusterError)
    return facts


def learn_facts(runs: Sequence[MemoryRun]) -> MemoryFacts:
    """Return runs with their corrections. Kinds with too few configurations get no correction."""
    configurations: dict[str, set[str]] = {}
    for run in runs:
        configurations.setdefault(run.kind, set()).add(run.configuration)
    enough = [kind for kind, names in configurations.items() if len(names) >= LEAST_CONFIGURATIONS]
    return MemoryFacts(runs=tuple(runs), corrections={kind: learn_correction(runs, kind) for kind in enough})
