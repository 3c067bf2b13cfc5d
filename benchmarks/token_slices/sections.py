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

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance, write_result
from pipefit.errors import PipefitError

SECTIONS = ("replay", "peaks", "head", "real", "lab")
QUICK = ("replay", "peaks", "head", "real")
"""What `--quick` measures unasked: everything that needs no root."""


def main() -> int:
    """All sections, or one; tables, targets, JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="One setting, short runs, no lab unless asked for.")
    parser.add_argument("--only", choices=SECTIONS, help="This section only; the others stay in a result that stands.")
    parser.add_argument("--json", help="Write the result here.")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result: dict[str, Any] = {}
    for name in (arguments.only,) if arguments.only else QUICK if arguments.quick else SECTIONS:
        section = importlib.import_module(f"benchmarks.token_slices.{name}")
        began = time.monotonic()
        try:
            found = section.measure(arguments.quick)
        except PipefitError as error:
            print(f"token_slices: {error.full_text()}", file=sys.stderr)
            return 2
        found["seconds"] = round(time.monotonic() - began, 1)
        found["provenance"] = provenance()
        result[name] = found
        section.show(found)
        show_targets(found["targets"])
    write_result(arguments.json, with_others(result, arguments.json) if arguments.only else result)
    return 0 if all(target["met"] for found in result.values() for target in found["targets"]) else 1


def with_others(sections: Mapping[str, Any], path: str | None) -> dict[str, Any]:
    """These sections, and from a result that stands the others."""
    known: dict[str, Any] = {}
    if path is not None and Path(path).is_file():
        known = json.loads(Path(path).read_text(encoding="utf-8"))
    known |= sections
    return {name: known[name] for name in SECTIONS if name in known}


def show_targets(targets: Sequence[Mapping[str, Any]]) -> None:
    """Every target with its figure."""
    for one in targets:
        verdict = "met" if one["met"] else "MISSED"
        print(f"  {verdict:>6}: {one['what']}: {one['reached']:.3f}, wanted {one['sign']} {one['wanted']:.3f}")
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
