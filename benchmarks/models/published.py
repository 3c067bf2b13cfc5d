"""Published models from their config.json alone: parameters, FLOPs, memory, and a plan on 64 H100 of 8 hosts.

Each model runs in a process of its own: it is opened without a cache (a class of transformers is captured, a native
family written), opened again (a captured one from the cache), and planned for 256 rows of 4,096 tokens, or of its
longest. A model that does not fit is planned again on 512 devices. A run passes if every number of parameters is the
published one within its tolerance, every capture takes at most 20 s, and every search on 64 devices at most 5 s. Times
are processor seconds, as one core does all the work, without the import of torch and transformers.

    python -m benchmarks.models.published [--quick] [--only MODEL] [--open-only] [--json PATH]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from argparse import SUPPRESS, Namespace
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from benchmarks.harness import Outcome, TextTable, benchmark_parser, earlier_result, keep_others, run_benchmark
from pipefit.cluster import open_cluster
from pipefit.cluster.kinds import data_sheet_kind
from pipefit.cluster.topology import device_count
from pipefit.errors import DoesNotFitError
from pipefit.model.capture_cache import CACHE_VARIABLE
from pipefit.model.graph import Model
from pipefit.model.registry import open_model, parameter_count
from pipefit.plan.make import make_plan
from pipefit.plan.request.constraints import parse_constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.sizing.sizes import layout_words
from pipefit.plan.types import Job, Plan
from pipefit.units import format_seconds

T = TypeVar("T")

DATA = Path(__file__).parents[1] / "data" / "published_models.json"

TOLERANCE = 1e-3
"""Relative difference from the published number of parameters, where a model states no other."""

CAPTURE_LIMIT_S, SEARCH_LIMIT_S = 20.0, 5.0
"""Processor seconds of a capture, and of a search on 64 devices."""

CLUSTERS = ("8x8xH100:3200Gbit/s", "64x8xH100:3200Gbit/s")
BATCH, SEQUENCE = 256, 4096
QUICK = ("google/gemma-2b", "Qwen/Qwen3-Next-80B-A3B-Instruct")
COLUMNS = (
    ("model", "<38"), ("read", "<9"), ("parameters", ">11"), ("error", ">8"), ("open", ">8"), ("cached", ">8"),
    ("devices", ">8"), ("search", ">8"), ("step", ">9"), ("MFU", ">6"), ("peak", ">10"), ("  layout", "<40"),
)  # fmt: skip


def read_models() -> dict[str, dict[str, Any]]:
    """Return the published models: `parameters`, `config`, and where they apply `tolerance` and `class`."""
    return dict(json.loads(DATA.read_text(encoding="utf-8"))["models"])


def main() -> int:
    parser = benchmark_parser(__doc__, quick="two models", only=read_models())
    parser.add_argument("--open-only", action="store_true", help="no plans: parameters, captures and the cache")
    parser.add_argument("--model", help=SUPPRESS)
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Measure every model in a process of its own; in such a process, one model."""
    models = read_models()
    if arguments.model:
        print(json.dumps(measure_model(models[arguments.model], not arguments.open_only)))
        return Outcome()
    names = [arguments.only] if arguments.only else QUICK if arguments.quick else list(models)
    rows: dict[str, dict[str, Any]] = {}
    table = TextTable(*COLUMNS)
    table.print_head()
    for name in names:
        words = [sys.executable, "-m", "benchmarks.models.published", "--model", name]
        words += ["--open-only"] if arguments.open_only else []
        rows[name] = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
        table.print_row(name, *row_cells(rows[name]))
    passed = all(row["missed"] == [] for row in rows.values())
    if arguments.only:
        rows = keep_others(rows, earlier_result(arguments.json).get("models", {}), models)
    limits = {"capture_limit_s": CAPTURE_LIMIT_S, "search_limit_s": SEARCH_LIMIT_S}
    return Outcome({**limits, "batch": BATCH, "models": rows}, passed=passed or arguments.quick)


def measure_model(entry: dict[str, Any], with_plan: bool) -> dict[str, Any]:
    """Open and count one model in this process, and plan it if asked to."""
    import transformers.modeling_utils  # noqa: F401

    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ[CACHE_VARIABLE] = str(Path(folder) / "cache")
        (Path(folder) / "config.json").write_text(json.dumps(entry["config"]), encoding="utf-8")
        sequence = min(SEQUENCE, entry["config"].get("max_position_embeddings", SEQUENCE))
        model, open_s = timed_call(partial(open_model, folder, sequence))
        cached, cached_s = timed_call(partial(open_model, folder, sequence))
    assert cached == model
    parameters = parameter_count(model)
    row = {
        "read": "captured" if "class" in entry else "native",
        "parameters": parameters,
        "error": parameters / entry["parameters"] - 1.0,
        "tolerance": entry.get("tolerance", TOLERANCE),
        "open_cpu_s": open_s,
        "cached_cpu_s": cached_s,
        **(plan_model(model, sequence) if with_plan else {}),
    }
    return {**row, "missed": missed_targets(row)}


def missed_targets(row: dict[str, Any]) -> list[str]:
    """Return the names of the targets that a row misses."""
    reached = {
        "parameters": abs(row["error"]) <= row["tolerance"],
        "capture": row["open_cpu_s"] <= CAPTURE_LIMIT_S,
        "search": row.get("search_cpu_s", 0.0) <= SEARCH_LIMIT_S,
        "plan": "step_s" in row,
    }
    return [name for name, is_met in reached.items() if not is_met]


def plan_model(model: Model, sequence: int) -> dict[str, Any]:
    """Plan a model on 64 devices, and on 512 if it does not fit there. The time is that of the search on 64."""
    job = Job(batch=BATCH, sequence=sequence, precision="bfloat16")
    facts: dict[str, Any] = {"sequence": sequence}
    for text in CLUSTERS:
        plan, search_s = timed_call(partial(find_plan, model, text, job))
        facts.setdefault("search_cpu_s", search_s)
        if isinstance(plan, Plan):
            return {**facts, "cluster": text, **plan_facts(plan, device_count(open_cluster(text)))}
        facts["unfit"] = plan
    return facts


def find_plan(model: Model, cluster: str, job: Job) -> Plan | str:
    """Return the plan on a cluster, or the memory that is missing there."""
    try:
        return make_plan(model, open_cluster(cluster), job, cluster_source=cluster)
    except DoesNotFitError as error:
        return str(error.seen)


def plan_facts(plan: Plan, devices: int) -> dict[str, Any]:
    """Return the layout, the step, the FLOPs and the fullest device of a plan."""
    prediction = plan.prediction
    assert prediction is not None
    fullest = max(prediction.lanes, key=lambda lane: lane.peak_bytes / lane.limit_bytes)
    return {
        "devices": devices,
        "decisions": {name: value for name, value in plan.decisions.items() if name != "mapping"},
        "step_s": prediction.step_s,
        "flops_per_step": prediction.flops_per_step,
        "peak_bytes": fullest.peak_bytes,
        "limit_bytes": fullest.limit_bytes,
    }


def timed_call(function: Callable[[], T]) -> tuple[T, float]:
    """Return the result of a call and its processor seconds."""
    began = time.process_time()
    result = function()
    return result, time.process_time() - began


def row_cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row of the printed table."""
    cells = [
        row["read"],
        f"{row['parameters'] / 1e9:.2f}B",
        f"{row['error']:+.2%}",
        f"{row['open_cpu_s']:.1f} s",
        f"{row['cached_cpu_s']:.1f} s",
    ]
    if "search_cpu_s" not in row:
        return [*cells, "-", "-", "-", "-", "-", "  not planned"]
    if "step_s" not in row:
        return [*cells, "-", f"{row['search_cpu_s']:.1f} s", "-", "-", "-", "  does not fit"]
    return [
        *cells,
        str(row["devices"]),
        f"{row['search_cpu_s']:.1f} s",
        format_seconds(row["step_s"]),
        f"{model_utilization(row):.0%}",
        f"{row['peak_bytes'] / 2**30:.1f} GiB",
        f"  {layout_text(row['decisions'])}",
    ]


def model_utilization(row: dict[str, Any]) -> float:
    """Return the FLOPs of the model a second, relative to the peak of the devices (MFU)."""
    kind, _ = data_sheet_kind("H100")
    return float(row["flops_per_step"] / row["step_s"] / (kind.peak_flops_per_s["bfloat16"] * row["devices"]))


def layout_text(decisions: dict[str, str]) -> str:
    """Return a layout in the words of `pipefit size`, from the decisions of a plan."""
    fixed = parse_constraints(f"{name}={text}" for name, text in decisions.items() if text)
    choices = {field.name: getattr(fixed, field.name, None) for field in fields(ParallelConfig)}
    return layout_words(ParallelConfig(**{name: choice for name, choice in choices.items() if choice is not None}))


if __name__ == "__main__":
    sys.exit(main())
