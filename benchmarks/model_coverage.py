"""Coverage of the causal language models of `transformers`: native, captured from the library's class, or refused.

Every model type gets a tiny random configuration of two layers (`tiny_configs.py`). A type without a family of pipefit
is captured from the class, and planned as two stages. Its loss and every gradient are compared in float64 with the
class itself. The reason for a refusal is that of the error message. Each type has a process of its own.
"""

from __future__ import annotations

import os
import pickle
import resource
import sys
import warnings
from argparse import Namespace
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness import Outcome, TextTable, benchmark_parser, run_benchmark
from benchmarks.tiny_configs import VOCABULARY, tiny_config

TOKENS, ROWS = 12, 3
CPU_S, DATA_BYTES = 90, 6 << 30
"""Limits of a type's process."""
EXACT = 1e-9
"""The largest difference of a gradient, relative to its largest element."""

QUICK = ("arcee", "biogpt", "codegen", "exaone4", "mamba2", "mpt", "nemotron", "olmo3", "phi", "stablelm", "xglm",
         "dots1")  # fmt: skip

STATES = ("native", "captured", "refused", "no tiny model")


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeResult:
    """The result of one model type."""

    model_type: str
    state: str
    "native, captured, refused, or `no tiny model` if the class refuses its tiny configuration."
    layers: int = 0
    "Layers of the captured chain."
    difference: float | None = None
    "The largest relative difference of the loss or a gradient from those of the class, in float64."
    reason: str = ""
    "The reason of a refusal."


def main() -> int:
    """Run the benchmark from the command line."""
    parser = benchmark_parser(__doc__, quick="twelve model types")
    parser.add_argument("--types", help="these model types only, with commas between")
    return run_benchmark(parser, measure_types)


def measure_types(arguments: Namespace) -> Outcome:
    """Return the results of all types. A captured type that is not exact misses the target."""
    import transformers

    kinds = QUICK if arguments.quick else arguments.types.split(",") if arguments.types else all_types()
    table = TextTable(("type", "<24"), ("state", "<15"), ("layers", ">6"), ("difference", ">12"))
    table.print_head()
    results = []
    for kind in kinds:
        result = measure_type(kind)
        results.append(result)
        shown = "" if result.difference is None else f"{result.difference:.1e}"
        table.print_row(kind, result.state, result.layers or "", shown, note=f"  {result.reason}")
    counts = Counter(result.state for result in results)
    print(", ".join(f"{state}: {counts[state]}" for state in STATES), f"of {len(results)}")
    exact = all(result.difference is None or result.difference <= EXACT for result in results)
    rows = [asdict(result) for result in results]
    counted = {state: counts[state] for state in STATES}
    return Outcome({"transformers": transformers.__version__, "counts": counted, "types": rows}, passed=exact)


def all_types() -> list[str]:
    """Return the model types of all causal language models of the installed `transformers`."""
    from pipefit.model.any_class import library_types

    return sorted(library_types("every type"))


def measure_type(kind: str) -> TypeResult:
    """Return the result of a type, measured by a process with limits of time and memory."""
    from pipefit.model.families import family_of_type

    if family_of_type(kind) is not None:
        return TypeResult(model_type=kind, state="native")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _answer_parent(kind, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    if not answer:
        return TypeResult(model_type=kind, state="refused", reason=f"more than {CPU_S} s or {DATA_BYTES >> 30} GiB")
    result = pickle.loads(answer)
    assert isinstance(result, TypeResult)
    return result


def _answer_parent(kind: str, writer: int) -> None:
    """Measure in the child, write the result, and end."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = measure_here(kind)
    except BaseException as error:
        result = TypeResult(model_type=kind, state="refused", reason=f"{type(error).__name__}: {first_line(error)}")
    with os.fdopen(writer, "wb") as pipe:
        pickle.dump(result, pipe)
    os._exit(0)


def measure_here(kind: str) -> TypeResult:
    """Return the result of a type without a family."""
    from pipefit.errors import PipefitError
    from pipefit.model.capture.whole import capture_whole

    try:
        example = tiny_example(kind)
    except Exception as error:
        return TypeResult(model_type=kind, state="no tiny model", reason=first_line(error))
    try:
        model = capture_whole(example, kind)
        plan_stages(model)
        drops = any(operator.kind == "dropout" for graph in model.graphs.values() for operator in graph.operators)
        if drops:
            example = tiny_example(kind, dropout=False)
        difference = class_difference(example, capture_whole(example, kind) if drops else model)
    except PipefitError as error:
        return TypeResult(model_type=kind, state="refused", reason=first_line(error))
    return TypeResult(model_type=kind, state="captured", layers=len(model.layers), difference=difference)


def tiny_example(kind: str, dropout: bool = True) -> Any:
    """Return the class of a type with initial values, and example inputs."""
    import torch

    from pipefit.model.any_class import FIELDS, library_example
    from pipefit.model.any_class import TOKENS as COUNT

    torch.manual_seed(0)
    return library_example({"source": kind, FIELDS: tiny_config(kind, dropout), COUNT: TOKENS})


def plan_stages(model: Any) -> None:
    """Plan two stages. Raises PipefitError if rows are mixed or the plan is refused."""
    from pipefit.cluster import local_cluster
    from pipefit.plan.evaluate.planner_context import build_plan
    from pipefit.plan.request.decisions import ParallelConfig
    from pipefit.plan.types import Job
    from pipefit.shard.apart import check_row_independence

    check_row_independence(model)
    job = Job(batch=8, sequence=TOKENS, precision="float64")
    build_plan(model, local_cluster(2), job, ParallelConfig(stages=2, microbatches=2), name="tiny")


def class_difference(example: Any, model: Any) -> float:
    """Return the largest difference of the loss or a gradient from those of the class, relative to the largest element,
    in float64 on one device."""
    import torch
    from tests.support.whole_runs import feed_of, reference, run_whole

    draw = torch.Generator().manual_seed(3)
    inputs = {name: torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=draw) for name in ("input_ids", "labels")}
    if hasattr(example.module, "set_experts_implementation"):
        example.module.set_experts_implementation("eager")
    torch.set_default_dtype(torch.float64)
    try:
        loss, gradients = reference(example, inputs)
    finally:
        torch.set_default_dtype(torch.float32)
    state = {name: parameter.detach() for name, parameter in example.module.named_parameters()}
    ours, others = run_whole(None, 0, model, (), (), state, feed_of(model, inputs), ROWS * TOKENS)
    differences = [abs(ours - loss) / max(1.0, abs(loss))]
    for name, gradient in gradients.items():
        scale = max(float(gradient.abs().max()), 1e-6)
        other = others.get(name, torch.zeros_like(gradient))
        differences.append(float((gradient - other).abs().max()) / scale)
    return max(differences)


def first_line(error: BaseException) -> str:
    """Return the reason of an error: what was seen, or its first line."""
    seen = getattr(error, "seen", None)
    lines = str(seen if seen is not None else error).strip().splitlines() or [type(error).__name__]
    return lines[0][:160]


if __name__ == "__main__":
    sys.exit(main())
