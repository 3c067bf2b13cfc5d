"""Predicted against published: every data set, and how much the split of the largest one matters.

python -m benchmarks.predictions.validation --json benchmarks/results/validation.json    docs/results/validation.md
python -m benchmarks.predictions.validation --quick                                      one split, under a minute
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from typing import Any

from benchmarks.harness import Outcome, benchmark_parser, run_benchmark
from pipefit.validate.calibration import SampleEvaluator
from pipefit.validate.files import shipped_collectives, shipped_text
from pipefit.validate.report import SHORT_ROWS, as_data, as_text, round_to
from pipefit.validate.sets import find_sets, vtrain

OTHER_SEEDS = range(1, 6)


def main() -> int:
    return run_benchmark(benchmark_parser(__doc__, quick="leave out the other splits"), measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Predict all published runs."""
    begin = time.process_time()
    results = [result for _, run in sorted(find_sets().items()) for result in run()]
    processor_s = time.process_time() - begin
    for result in results:
        print(as_text(result) + "\n", flush=True)
    data: dict[str, Any] = {
        "results": [as_data(result, rows=len(result.rows) <= SHORT_ROWS) for result in results],
        "processor_seconds": round_to(processor_s, 3),
    }
    if not arguments.quick:
        data["vtrain_other_seeds"] = other_splits()
    return Outcome(data)


def other_splits() -> dict[str, Any]:
    """The figures of the vTrain set when its keys are dealt into quarters by other seeds."""
    samples = vtrain.read_samples(shipped_text(vtrain.FILE))
    evaluator = SampleEvaluator(shipped_collectives())
    found = {}
    for seed in OTHER_SEEDS:
        result = vtrain.split_result(samples, evaluator, seed)
        reached = {target.what: round_to(target.reached) for target in result.targets}
        found[str(seed)] = {**reached, **{key: round_to(value) for key, value in result.summary.items()}}
        print(f"seed {seed}: " + ", ".join(f"{key} {value:.2%}" for key, value in reached.items()), flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
