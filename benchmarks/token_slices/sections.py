"""The proof of token slices: TeraPipe's settings again, a paced lab, real arithmetic, and the peaks of schedules.

    python -m benchmarks.token_slices.sections [--quick] [--only replay|peaks|head|real|lab] [--json PATH]

- replay: the ten published settings in the simulator (`replay.py`), predicted beside published;
- real: two processes, two sequences, nothing emulated (`real.py`);
- lab: eight emulated devices, planned on what `pipefit profile` measures there (`lab.py`; root, iproute2);
- peaks: simulated peaks of schedules with slices against published formulas (`peaks.py`);
- head: the measured peak of the last stage, whose logits are those of a slice (`head.py`).

The baseline is always the best schedule without slices, of GPipe, 1F1B and interleaved 1F1B, on the same layout, with
one sequence a microbatch. `--only` measures one section again; the others stay in a result that stands. The exit code
is 1 where a target is missed.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import Outcome, benchmark_parser, earlier_result, keep_others, run_benchmark, write_result
from benchmarks.provenance import provenance

SECTIONS = ("replay", "peaks", "head", "real", "lab")
QUICK = ("replay", "peaks", "head", "real")
"""What `--quick` measures unasked: everything that needs no root."""


def main() -> int:
    """All sections, or one; tables, targets, JSON."""
    parser = benchmark_parser(__doc__, quick="one setting, short runs, no lab unless asked for", only=SECTIONS)
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Measure the sections, each with its own provenance."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result: dict[str, Any] = {}
    for name in (arguments.only,) if arguments.only else QUICK if arguments.quick else SECTIONS:
        section = importlib.import_module(f"benchmarks.token_slices.{name}")
        began = time.monotonic()
        found = section.measure(arguments.quick)
        found["seconds"] = round(time.monotonic() - began, 1)
        found["provenance"] = provenance()
        result[name] = found
        section.show(found)
        show_targets(found["targets"])
    earlier = earlier_result(arguments.json) if arguments.only else {}
    write_result(arguments.json, keep_others(result, earlier, SECTIONS))
    return Outcome(passed=all(target["met"] for found in result.values() for target in found["targets"]))


def show_targets(targets: Sequence[Mapping[str, Any]]) -> None:
    """Every target with its figure."""
    for one in targets:
        verdict = "met" if one["met"] else "MISSED"
        print(f"  {verdict:>6}: {one['what']}: {one['reached']:.3f}, wanted {one['sign']} {one['wanted']:.3f}")
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
