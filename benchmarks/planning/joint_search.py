"""Whether a plan under fixed choices is ever faster than the free plan: random requests, and random pins of each.

Every request draws a model, a cluster of equal or unlike devices with fast or slow links, a batch and a sequence
length. The free search plans it, and then the same search with some choices fixed (`--fix`). A pin beats the free plan
if its predicted step is shorter by more than 0.5 %. Pins that leave no plan, or none that fits, are counted apart. The
published count asks for no pin that beats the free plan.

    python -m benchmarks.planning.joint_search [--quick] [--requests N] [--pins N] [--json PATH]
"""

from __future__ import annotations

import random
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from benchmarks.harness import Outcome, benchmark_parser, markdown_table, report_progress, run_benchmark
from pipefit.cluster import parse_spec
from pipefit.errors import DoesNotFitError, PlanError
from pipefit.model.graph import Model
from pipefit.model.registry import open_model
from pipefit.plan.evaluate.outcome import EvaluatedPlan
from pipefit.plan.evaluate.planner_context import PlannerContext
from pipefit.plan.make import iter_passes, prepare_request
from pipefit.plan.request.constraints import NO_CONSTRAINTS, Constraints, describe_choices, parse_constraints
from pipefit.plan.types import Job
from pipefit.units import format_seconds

SEED = 20261126
MARGIN = 0.005
"""A pin beats the free plan if its step is shorter by more than this fraction."""

MODELS = ("gpt2-xl", "llama-3.2-1b", "llama-3.2-3b", "llama-3-8b", "qwen3-30b-a3b", "mixtral-8x7b", "llama-3-70b")
KINDS = ("H100", "A100-80", "A100-40", "L40S")
NETWORKS = ("25Gbit/s", "100Gbit/s", "400Gbit/s", "3200Gbit/s")

FIXES = {
    "replicas": ("1", "2", "4", "8"),
    "stages": ("1", "2", "4", "8"),
    "context": ("1", "2", "4"),
    "shards": ("1", "2", "4", "8"),
    "sharding": ("megatron", "megatron-sp", "expert", "searched"),
    "microbatches": ("4", "8", "16", "32"),
    "schedule": ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "v-half"),
    "recompute": ("none", "selective", "full"),
    "sharded_state": ("none", "optimizer", "gradients", "parameters"),
    "state_group": ("2", "4", "8"),
    "slices": ("1", "2", "4"),
}
"""Values of `--fix` that pins are drawn from."""


@dataclass(frozen=True, slots=True)
class DrawnRequest:
    """One planning request."""

    model: str
    cluster: str
    job: Job

    @property
    def text(self) -> str:
        return f"{self.model} on {self.cluster}, batch {self.job.batch} x {self.job.sequence}"


def main() -> int:
    parser = benchmark_parser(__doc__, quick="two small requests with two pins each")
    parser.add_argument("--requests", type=int, default=24, help="number of requests")
    parser.add_argument("--pins", type=int, default=6, help="combinations of pins of each request")
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Plan all requests, free and pinned."""
    count, pins = (2, 2) if arguments.quick else (arguments.requests, arguments.pins)
    rows, tell = [], report_progress("requests")
    for number, request in enumerate(draw_requests(count, quick=arguments.quick)):
        rows.append(compare_pins(request, pins, random.Random(SEED + number)))
        tell(number + 1, count)
    outcomes = Counter(pin["outcome"] for row in rows for pin in row["pins"])
    print(markdown_table(("request", "free plan", "step", "CPU", "pins", "faster than free"), map(table_row, rows)))
    print(", ".join(f"{name}: {number}" for name, number in sorted(outcomes.items())))
    return Outcome({"seed": SEED, "margin": MARGIN, "outcomes": dict(outcomes), "rows": rows}, not outcomes["faster"])


def table_row(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a request as a line of the table."""
    faster = [f"{pin['fix']} ({1 - pin['ratio']:.1%})" for pin in row["pins"] if pin["outcome"] == "faster"]
    return (
        row["request"],
        row["plan"] or "does not fit",
        format_seconds(row["step_s"]) if row["step_s"] else "",
        format_seconds(row["cpu_s"]),
        str(sum(pin["outcome"] in ("slower", "faster") for pin in row["pins"])),
        ", ".join(faster),
    )


def draw_requests(count: int, quick: bool = False) -> Iterator[DrawnRequest]:
    """Yield random requests, the same ones for every run."""
    draw = random.Random(SEED)
    for _ in range(count):
        hosts, devices = draw.choice((1, 1, 2, 4, 8)), draw.choice((2, 4, 8))
        kind, network = draw.choice(KINDS), draw.choice(NETWORKS)
        model, batch, sequence = draw.choice(MODELS), draw.choice((16, 64, 256)), draw.choice((1024, 4096, 8192))
        if quick:
            hosts, devices, model, batch = 1, 2, "llama-3.2-1b", 16
        if model == "gpt2-xl":
            sequence = 1024
        spec = f"{devices}x{kind}" if hosts == 1 else f"{hosts}x{devices}x{kind}:{network}"
        yield DrawnRequest(model, spec, Job(batch=batch, sequence=sequence, precision="bfloat16"))


def draw_pins(draw: random.Random) -> tuple[str, ...]:
    """Return a random combination of up to four fixed choices."""
    keys = draw.sample(sorted(FIXES), draw.choice((1, 2, 2, 3, 4)))
    return tuple(f"{key}={draw.choice(FIXES[key])}" for key in keys)


def compare_pins(request: DrawnRequest, pins: int, draw: random.Random) -> dict[str, Any]:
    """Return the free plan of a request, and how its pinned plans compare."""
    start = time.process_time()
    free = best_of(request, NO_CONSTRAINTS)
    row: dict[str, Any] = {
        "request": request.text,
        "plan": describe_choices(free.decisions) if free is not None else None,
        "step_s": free.step_s if free is not None else None,
        "cpu_s": time.process_time() - start,
        "pins": [],
    }
    for _ in range(pins):
        fixes = draw_pins(draw)
        pin: dict[str, Any] = {"fix": " ".join(fixes), "outcome": "refused"}
        try:
            plan = best_of(request, parse_constraints(fixes))
        except PlanError:
            row["pins"].append(pin)
            continue
        pin["outcome"] = "does not fit"
        if plan is not None:
            ratio = plan.step_s / free.step_s if free is not None else 0.0
            faster = ratio < 1 - MARGIN
            pin |= {"outcome": "faster" if faster else "slower", "step_s": plan.step_s, "ratio": ratio}
            pin["plan"] = describe_choices(plan.decisions)
        row["pins"].append(pin)
    return row


def best_of(request: DrawnRequest, constraints: Constraints) -> EvaluatedPlan | None:
    """Return the fastest plan under the constraints; None if none fits. Raises PlanError if they leave none."""
    context = PlannerContext(captured(request.model), parse_spec(request.cluster))
    try:
        *_, state = iter_passes(prepare_request(context, request.job, constraints))
    except DoesNotFitError:
        return None
    return state.result.fitting[0]


@lru_cache(maxsize=len(MODELS))
def captured(model: str) -> Model:
    """Return a captured model, once per run."""
    return open_model(model)


if __name__ == "__main__":
    raise SystemExit(main())
