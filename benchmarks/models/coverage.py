"""Coverage of the causal language models of `transformers`: native, captured from the library's class, or refused.

Every model type gets a tiny random configuration of two layers (`tiny_configs.py`), and is planned for four devices as
two stages. A type without a family of pipefit is captured from the class. Its loss and every gradient are compared in
float64 with the class itself. Then it is trained for two steps by two processes, a stage each, and losses and changes
of parameters are compared with the class in one process. Weight files of a captured type are read as the class's
`save_pretrained` writes them, and written for its `from_pretrained`; both must be equal to the last bit
(`weight_files.py`). The reason for a refusal and the next step are those of the error message. Each type is measured in
a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import sys
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.harness import Outcome, TextTable, benchmark_parser, run_benchmark
from benchmarks.models.tiny_configs import VOCABULARY, tiny_config
from benchmarks.models.weight_files import EQUAL, compare_files

TOKENS, ROWS, STEPS, STAGES = 12, 3, 2, 2
CPU_S, DATA_BYTES = 120, 12 << 30
"""Limits of a type's process."""
EXACT = 1e-9
"""The largest difference of a gradient, relative to its largest element."""
ASKED = 0.9
"""The share of all types that are planned and trained."""

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
    trained: float | None = None
    "The same of two losses and of the changes of parameters, trained by two processes with SGD."
    weights: str = ""
    "Weight files of a captured type, read and written: `exact`, or the reason that they are not."
    reason: str = ""
    "The reason of a refusal."
    next_step: str = ""
    "The next step by the message of a refusal."


def main() -> int:
    """Run the benchmark from the command line."""
    parser = benchmark_parser(__doc__, quick="twelve model types")
    parser.add_argument("--types", help="these model types only, with commas between")
    return run_benchmark(parser, measure_types)


def measure_types(arguments: Namespace) -> Outcome:
    """Return the results of all types. A planned type that is not exact misses the target, as do its weight files."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # a class that asks the network for files would wait for it
    import transformers

    kinds = QUICK if arguments.quick else arguments.types.split(",") if arguments.types else all_types()
    table = TextTable(("type", "<24"), ("state", "<15"), ("layers", ">6"), ("difference", ">12"), ("trained", ">12"))
    table.print_head()
    results = []
    for result in run_types(kinds):
        results.append(result)
        shown = ["" if value is None else f"{value:.1e}" for value in (result.difference, result.trained)]
        note = result.reason or ("" if result.weights in ("", EQUAL) else f"weight files: {result.weights}")
        table.print_row(result.model_type, result.state, result.layers or "", *shown, note=f"  {note}")
    counts = Counter(result.state for result in results)
    print(", ".join(f"{state}: {counts[state]}" for state in STATES), f"of {len(results)}")
    exact = all(is_exact(result) for result in results)
    planned = counts["native"] + counts["captured"]
    rows = [asdict(result) for result in results]
    counted = {state: counts[state] for state in STATES}
    body = {"transformers": transformers.__version__, "counts": counted, "types": rows}
    return Outcome(body, passed=exact and planned >= ASKED * len(results))


def is_exact(result: TypeResult) -> bool:
    """Return whether a type is not planned, or its gradients, training and weight files are those of the class."""
    if result.state not in ("native", "captured"):
        return True
    if result.difference is None or result.trained is None or result.weights not in ("", EQUAL):
        return False
    return result.difference <= EXACT >= result.trained


def all_types() -> list[str]:
    """Return the model types of all causal language models of the installed `transformers`."""
    from pipefit.model.any_class import library_types

    return sorted(library_types("every type"))


def is_native(kind: str) -> bool:
    """Return whether a family reads the type as a language model. Families with images are measured by their tests."""
    from pipefit.model.families import family_of_type

    family = family_of_type(kind)
    return family is not None and bool(family.graphs)


def run_types(kinds: Sequence[str]) -> Iterator[TypeResult]:
    """Yield the result of each type in order. Two processes train all types."""
    from tests.support.pool import Pool

    captured = [kind for kind in kinds if not is_native(kind)]
    if captured:
        warm_up(captured[0])
    pool = None
    for kind in kinds:
        result, training = measure_apart(kind)
        if training is not None:
            pool = pool if pool is not None and pool.alive else Pool(STAGES)
            result = train_apart(pool, result, training)
        yield result
    if pool is not None:
        pool.close()


def warm_up(kind: str) -> None:
    """Import in this process the modules that all types need. A type that is refused is its own process's to report."""
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pipefit.model.capture.whole import capture_whole

        plan_stages(capture_whole(tiny_example(kind), kind))


def measure_apart(kind: str) -> tuple[TypeResult, Any]:
    """Return the result of a type and the training to compare, measured by a process with limits of time and memory."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _answer_parent(kind, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    if not answer:
        reason = f"more than {CPU_S} s or {DATA_BYTES >> 30} GiB"
        return TypeResult(model_type=kind, state="refused", reason=reason), None
    result, training = pickle.loads(answer)
    assert isinstance(result, TypeResult)
    return result, training


def _answer_parent(kind: str, writer: int) -> None:
    """Measure in the child, write the result, and end."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answer = measure_here(kind)
    except BaseException as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        answer = TypeResult(model_type=kind, state="refused", reason=reason), None
    with os.fdopen(writer, "wb") as pipe:
        pickle.dump(answer, pipe)
    os._exit(0)


def measure_here(kind: str) -> tuple[TypeResult, Any]:
    """Return the result of a type, and its training if it is planned."""
    from pipefit.errors import PipefitError

    try:
        if not is_native(kind):
            return measure_captured(kind)
        from benchmarks.models.native_types import measure_native

        layers, difference, training = measure_native(kind)
    except PipefitError as error:
        refusal = {"reason": first_line(error), "next_step": error.next_step or ""}
        return TypeResult(model_type=kind, state="refused", **refusal), None
    return TypeResult(model_type=kind, state="native", layers=layers, difference=difference), training


def measure_captured(kind: str) -> tuple[TypeResult, Any]:
    """Return the result of a type without a family, and its training. Raises PipefitError."""
    from pipefit.model.capture.whole import capture_whole

    try:
        example = tiny_example(kind)
    except Exception as error:
        return TypeResult(model_type=kind, state="no tiny model", reason=first_line(error)), None
    model = capture_whole(example, kind)
    plan_stages(model)
    drops = any(operator.kind == "dropout" for graph in model.graphs.values() for operator in graph.operators)
    if drops:
        example = tiny_example(kind, dropout=False)
        model = capture_whole(example, kind)
    difference = class_difference(example, model)
    training = class_training(example, model)
    layers, weights = len(model.layers), compare_files(tiny_config(kind))
    result = TypeResult(model_type=kind, state="captured", layers=layers, difference=difference, weights=weights)
    return result, training


def tiny_example(kind: str, dropout: bool = True, tokens: int = TOKENS) -> Any:
    """Return the class of a type with initial values, and example inputs of that many tokens."""
    import torch

    from pipefit.model.any_class import FIELDS, library_example
    from pipefit.model.any_class import TOKENS as COUNT

    torch.manual_seed(0)
    example = library_example({"source": kind, FIELDS: tiny_config(kind, dropout), COUNT: tokens})
    if hasattr(example.module, "set_experts_implementation"):
        example.module.set_experts_implementation("eager")  # the only one for float64
    return example


def plan_stages(model: Any, tokens: int = TOKENS) -> None:
    """Plan two stages of two replicas for rows of `tokens` tokens.

    Raises PipefitError if rows are mixed or the plan is refused.
    """
    from pipefit.cluster import local_cluster
    from pipefit.plan.evaluate.planner_context import build_plan
    from pipefit.plan.request.decisions import ParallelConfig
    from pipefit.plan.types import Job
    from pipefit.shard.apart import check_row_independence

    check_row_independence(model)
    job = Job(batch=8, sequence=tokens, precision="float64")
    decisions = ParallelConfig(stages=STAGES, microbatches=2, replicas=(1, 1))
    build_plan(model, local_cluster(2 * STAGES), job, decisions, name="tiny")


def class_difference(example: Any, model: Any) -> float:
    """Return the largest difference of the loss or a gradient from those of the class, relative to the largest element,
    in float64 on one device."""
    import torch
    from tests.support.whole_runs import feed_of, reference, run_whole

    draw, tokens = torch.Generator().manual_seed(3), example.inputs["input_ids"].shape[1]
    inputs = {name: torch.randint(0, VOCABULARY, (ROWS, tokens), generator=draw) for name in ("input_ids", "labels")}
    with float64_default():
        loss, gradients = reference(example, inputs)
    state = {name: parameter.detach() for name, parameter in example.module.named_parameters()}
    ours, others = run_whole(None, 0, model, (), (), state, feed_of(model, inputs), ROWS * tokens)
    differences = [loss_difference(ours, loss)]
    for name, gradient in gradients.items():
        other = others.get(name, torch.zeros_like(gradient))
        differences.append(relative_difference(other, gradient, gradient, LEAST_GRADIENT))
    return max(differences)


LEAST_GRADIENT, LEAST_CHANGE = 1e-6, 1e-8
"""Gradients and changes of parameters are compared relative to their largest element, or to these numbers if it is
smaller."""


def relative_difference(ours: Any, wanted: Any, size: Any, least: float) -> float:
    """Return the largest difference of two arrays relative to the largest element of `size`, or to `least`."""
    return float(abs(ours - wanted).max()) / max(float(abs(size).max()), least)


def loss_difference(ours: float, wanted: float) -> float:
    """Return the difference of two losses relative to the second, or to 1 if that is smaller."""
    return abs(ours - wanted) / max(1.0, abs(wanted))


def class_training(example: Any, model: Any) -> Any:
    """Return (function, plan, material, losses, parameters) of a training: the function of the processes, the plan of
    two stages, its input for the processes, and the losses and parameters of the class in one process."""
    import torch
    from tests.support.whole_cases import Whole, train_whole

    torch.manual_seed(1)
    case = Whole(example, classes=VOCABULARY, sequence=TOKENS, optimizer="sgd", model=model)
    plan = case.plan(stages=STAGES, microbatches=2)
    with float64_default():
        return train_whole, plan, case.material, *case.reference(plan, STEPS)


@contextlib.contextmanager
def float64_default() -> Iterator[None]:
    """Make float64 the default of PyTorch: classes ask it for the least number of their masks."""
    import torch

    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def train_apart(pool: Any, result: TypeResult, training: Any) -> TypeResult:
    """Return the result of a type after a training by the processes of the pool."""
    from tests.support import worker_cases as cases

    function, plan, material, losses, wanted = training
    try:
        pool.run(cases.prepare, [(plan, material[0])], ranks=STAGES)
        ours, parameters = pool.run(function, plan, *material, STEPS, ranks=STAGES)[0][:2]
        pool.run(cases.forget_groups, ranks=STAGES)
    except AssertionError as error:
        reason = str(error).strip().splitlines()[-1]
        return replace(result, state="refused", reason=f"training: {reason[:160]}")
    initial = material[1]
    differences = [loss_difference(*pair) for pair in zip(ours, losses, strict=True)]
    differences += [
        relative_difference(value, wanted[name], wanted[name] - initial[name], LEAST_CHANGE)
        for name, value in parameters.items()
    ]
    return replace(result, trained=max(differences))


def first_line(error: BaseException) -> str:
    """Return the reason of an error: what was seen, or its first line."""
    seen = getattr(error, "seen", None)
    lines = str(seen if seen is not None else error).strip().splitlines() or [type(error).__name__]
    return lines[0][:160]


if __name__ == "__main__":
    sys.exit(main())
