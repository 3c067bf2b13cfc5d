"""One GPU: tokens per second, MFU and memory of a stage that holds a whole model, beside PyTorch itself.

Three ways to train the same Llama-shaped model (1B and 3B by default) on the same tokens in the same run, one after
the other: pipefit's stage program, the model's plain modules in eager PyTorch, and those modules under torch.compile.
Parameters and computing are bfloat16; gradients of a step are summed in float32; the optimizer is the same for all
three (pipefit's AdamW with float32 masters), so that the difference is the forward and the backward.

MFU = model FLOPs per second / peak. Model FLOPs: matrix products and attention of forward and backward as PyTorch's
FlopCounterMode counts them (full square of queries and keys, nothing recomputed). Peak: the data sheet's dense
bfloat16 figure of the device, printed with its source, or --peak.

Memory: predicted is what `pipefit plan` would say of one device of --cluster (the kind of device changes times, not
bytes), for one stage and the same microbatches, its assumed workspace included; measured is
torch.cuda.max_memory_allocated of the steps.

    python -m benchmarks.runtime.single_gpu [--models llama-3.2-1b llama-3.2-3b] [--cluster 1xH200] [--quick]
        [--json PATH]

Needs a CUDA device. --quick trains a tiny shape on the CPU instead: it shows that the code runs, and measures nothing.
"""

from __future__ import annotations

import gc
import inspect
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.harness import Outcome, benchmark_parser, run_benchmark
from pipefit.cluster import Cluster, open_cluster
from pipefit.errors import PipefitError
from pipefit.model.analysis.totals import graph_flops
from pipefit.model.capture.layers import capture_family
from pipefit.model.graph import Model
from pipefit.model.registry import build_layers, resolve_model
from pipefit.optimizers import FlatPiece, find_optimizer
from pipefit.plan.assemble.predict import add_prediction, simulate_plan
from pipefit.plan.evaluate.planner_context import build_plan
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.types import Job
from pipefit.precision import Precision
from pipefit.run.session.metrics import find_peak
from pipefit.run.stage.program import StageLayer, StageProgram, StageSetup
from pipefit.run.stage_inputs import StageInputs


@dataclass(frozen=True)
class Shape:
    """What is trained, and how."""

    device: torch.device
    dtype: torch.dtype
    precision: Precision
    rows: int
    "Sequences of a microbatch."
    tokens: int
    microbatches: int
    recompute: Any
    steps: int
    warmup: int
    backend: str
    "Of torch.compile."


def main() -> int:
    parser = benchmark_parser(__doc__, quick="a tiny shape on the CPU: tests the code, measures nothing")
    parser.add_argument("--models", nargs="+", default=["llama-3.2-1b", "llama-3.2-3b"])
    parser.add_argument("--cluster", default="1xH200", help="one device of the kind that the memory is predicted for")
    parser.add_argument("--rows", type=int, default=4, help="sequences of a microbatch")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--recompute", choices=["none", "selective", "full"], default="none")
    parser.add_argument("--peak", type=float, help="FLOP/s that MFU is measured against")
    return run_benchmark(parser, measure_all)


def measure_all(a: Namespace) -> Outcome:
    """Train every model three ways on one device."""
    if not a.quick and not torch.cuda.is_available():
        raise PipefitError(
            "This benchmark needs a CUDA device, and PyTorch sees none.",
            seen=f"torch {torch.__version__}",
            next_step="run it on a machine with a GPU, or --quick to run the code on a tiny model on the CPU",
        )
    if a.quick:
        shape = Shape(torch.device("cpu"), torch.float32, "float32", 2, 32, 2, a.recompute, 2, 1, "aot_eager")
        a.models, a.cluster = ["tiny"], "local:1"
    else:
        shape = Shape(
            torch.device("cuda"), torch.bfloat16, "bfloat16", a.rows, a.tokens, a.microbatches, a.recompute, a.steps, 3,
            "inductor",
        )  # fmt: skip
    cluster = open_cluster(a.cluster)
    peak = find_peak(shape.device, shape.precision)
    flops_per_s, source = (a.peak, "--peak") if a.peak else (peak.flops_per_s, peak.source)
    print(f"peak used for MFU: {flops_per_s:.4g} FLOP/s ({source})")
    models = {name: measure(name, shape, cluster, flops_per_s) for name in a.models}
    result = {
        "device": "cpu, code test only" if a.quick else torch.cuda.get_device_name(),
        "peak_flops_per_s": flops_per_s,
        "peak_source": source,
        "shape": {k: str(v) if k in ("device", "dtype") else v for k, v in vars(shape).items()},
        "predicted_for": a.cluster,
        "models": models,
    }
    return Outcome(result, passed=all(row["losses_agree"] for row in models.values()))


def measure(name: str, shape: Shape, cluster: Cluster, peak: float) -> dict[str, Any]:
    """The three ways for one model: a table as it is printed."""
    described = resolve_model(name)
    model = capture_family(described.family, described.config)
    symbols = {"B": shape.rows, "T": shape.tokens}
    flops = (
        sum(graph_flops(model.layer_graph(layer), symbols).total_flops for layer in model.layers) * shape.microbatches
    )
    tokens = shape.rows * shape.tokens * shape.microbatches
    predicted = predict_bytes(model, shape, cluster)
    print(f"{name}: {tokens} tokens and {flops:.4g} model FLOPs a step, predicted {predicted / 2**30:.2f} GiB")
    rows: dict[str, Any] = {}
    ways: dict[str, Callable[[], Any]] = {
        "pipefit": lambda: stage_way(model, shape),
        "pytorch eager": lambda: plain_way(described, shape, compiled=False),
        "pytorch compiled": lambda: plain_way(described, shape, compiled=True),
    }
    for way, make in ways.items():
        seconds, losses, memory = timed(make, shape)
        step_s = statistics.median(seconds)
        rows[way] = {
            "step_s": step_s,
            "all_step_s": seconds,
            "tokens_per_s": tokens / step_s,
            "mfu": flops / step_s / peak if peak else None,
            "measured_bytes": memory,
            "losses": losses,
        }
        share = f"{rows[way]['mfu']:.1%}" if peak else "n/a"
        print(
            f"  {way:17} {tokens / step_s:10,.0f} tokens/s   MFU {share:>6}   {memory / 2**30:6.2f} GiB"
            f"   loss {losses[0]:.4f} to {losses[-1]:.4f}",
            flush=True,
        )
    first = [row["losses"][0] for row in rows.values()]
    return {
        "ways": rows,
        "model_flops_per_step": flops,
        "tokens_per_step": tokens,
        "predicted_bytes": predicted,
        "losses_agree": max(first) - min(first) < 0.01 * abs(first[0]),
    }


def predict_bytes(model: Model, shape: Shape, cluster: Cluster) -> float:
    """Peak of the only lane, as the planner's simulator tells a user of it: states, activations, workspace."""
    job = Job(batch=shape.rows * shape.microbatches, sequence=shape.tokens, precision=shape.precision)
    decisions = ParallelConfig(stages=1, microbatches=shape.microbatches, recompute=(shape.recompute,))
    plan = build_plan(model, cluster, job, decisions)
    plan = add_prediction(plan, model, simulate_plan(plan, model, cluster))
    assert plan.prediction is not None
    return plan.prediction.lanes[0].peak_bytes


def timed(make: Callable[[], Any], shape: Shape) -> tuple[list[float], list[float], int]:
    """(seconds of every step, losses, peak bytes) of one way; everything of it is freed afterwards."""
    cuda = shape.device.type == "cuda"
    step = make()
    losses = [step() for _ in range(shape.warmup)]
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(shape.steps):
        start = time.perf_counter()
        losses.append(step())
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    memory = torch.cuda.max_memory_allocated() if cuda else 0
    values = [float(loss) for loss in losses]
    del step, losses
    gc.collect()
    torch._dynamo.reset()
    if cuda:
        torch.cuda.empty_cache()
    return seconds, values, memory


def make_feeds(shape: Shape, vocabulary: int) -> list[StageInputs]:
    """The microbatches of a step: random tokens, the same in every way and step."""
    generator = torch.Generator().manual_seed(0)
    feeds = []
    for _ in range(shape.microbatches):
        stream = torch.randint(0, vocabulary, (shape.rows, shape.tokens + 1), generator=generator).to(shape.device)
        positions = torch.arange(shape.tokens, device=shape.device).expand(shape.rows, shape.tokens).contiguous()
        rows = torch.arange(shape.rows, device=shape.device)
        feeds.append(
            StageInputs(
                tokens=stream[:, :-1].contiguous(), labels=stream[:, 1:].contiguous(), positions=positions, rows=rows
            )
        )
    return feeds


def initialise(parameters: dict[str, Any]) -> None:
    """Values that depend on a parameter's name only."""
    for name in sorted(parameters):
        value = parameters[name]
        generator = torch.Generator(device=value.device).manual_seed(sum(map(ord, name)))
        with torch.no_grad():
            if value.dim() > 1:
                value.normal_(0.0, 0.02, generator=generator)
            else:
                value.fill_(1.0 if "norm" in name else 0.0)


def optimizers(parameters: dict[str, Any]) -> tuple[dict[str, torch.Tensor], Callable[[int], None]]:
    """(float32 gradient buffers, the update of step n) for all parameters."""
    adamw = find_optimizer("adamw")
    options = adamw.options()
    buffers = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}
    states = {
        name: adamw.state(
            adamw,
            FlatPiece(
                parameter=p.data.view(-1),
                master_dtype=torch.float32,
                decays=p.dim() > 1,
                shapes={name: tuple(p.shape)},
            ),
            options,
        )
        for name, p in parameters.items()
    }

    def update(count: int) -> None:
        for name, state in states.items():
            state.step(buffers[name].view(-1), options.lr, count)
            buffers[name].zero_()

    return buffers, update


def stage_way(model: Model, shape: Shape) -> Callable[[], torch.Tensor]:
    """A training step through pipefit's stage program."""
    layers = [StageLayer(layer.name, model.layer_graph(layer), layer.parameters) for layer in model.layers]
    backend = None if shape.device.type == "cpu" else shape.backend
    program = StageProgram(
        layers, StageSetup(recompute=shape.recompute, device=shape.device, dtype=shape.dtype, backend=backend)
    )
    initialise(dict(program.parameters))
    buffers, update = optimizers(dict(program.parameters))
    program.bind_gradients(buffers)
    feeds = make_feeds(shape, int(model.config["vocab_size"]))
    divisor = len(feeds) * shape.rows * shape.tokens
    count = 0

    def step() -> torch.Tensor:
        nonlocal count
        program.begin_step(count, divisor)
        total = torch.zeros((), device=shape.device)
        for index, feed in enumerate(feeds):
            total += program.forward(index, 0, {}, feed)["loss"]
            program.backward(index, 0, {})
        count += 1
        update(count)
        return total / divisor

    return step


class Chain(nn.Module):
    """The plain modules one after the other; a tied parameter is one parameter."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.roles = [list(inspect.signature(layer.forward).parameters) for layer in layers]

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor) -> Any:
        values: dict[str, Any] = {"tokens": tokens, "positions": positions, "labels": labels}
        for layer, roles in zip(self.layers, self.roles, strict=True):
            values["x"] = layer(*[values[role] for role in roles])
        return values["x"]


def plain_way(described: Any, shape: Shape, compiled: bool) -> Callable[[], torch.Tensor]:
    """A training step of the plain modules; gradients are moved into float32 buffers as they come."""
    chain = Chain(build_layers(described.family, described.config, device=shape.device, dtype=shape.dtype))
    parameters: dict[str, Any] = {}
    for layer in chain.layers:
        for local, parameter in layer.named_parameters():
            parameters.setdefault(layer.parameter_names[local], parameter)  # type: ignore[union-attr,index]
    initialise(parameters)
    buffers, update = optimizers(parameters)

    def move(parameter: Any, buffer: torch.Tensor) -> None:
        buffer.add_(parameter.grad)
        parameter.grad = None

    for name, parameter in parameters.items():
        parameter.register_post_accumulate_grad_hook(lambda p, buffer=buffers[name]: move(p, buffer))
    model: Any = torch.compile(chain, backend=shape.backend) if compiled else chain
    feeds = make_feeds(shape, int(described.config["vocab_size"]))
    divisor = len(feeds) * shape.rows * shape.tokens
    count = 0

    def step() -> torch.Tensor:
        nonlocal count
        total = torch.zeros((), device=shape.device)
        for feed in feeds:
            loss = model(feed.tokens, feed.positions, feed.labels)
            (loss / divisor).backward()
            total += loss.detach()
        count += 1
        update(count)
        return total / divisor

    return step


if __name__ == "__main__":
    sys.exit(main())
