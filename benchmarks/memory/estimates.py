"""Memory estimates: a correction learned on plans of at most 4 devices predicts plans of 8 and 16 devices.

Plans are drawn at random (seeded) over model families, sequence lengths, microbatch sizes, schedules, recomputation,
shards, ZeRO-1, number types and slices; larger models and more devices where estimates are judged than where they are
learned. Among them slices come without recomputation; plans with both are drawn by themselves, to be judged. Of every
plan the fullest rank runs alone, as `pipefit verify` runs it (the two fullest where they are learned from): parameters,
gradients, optimizer state, activations, buffers and workspace, counted by the CPU allocator's own record. Beside the
corrected estimates stand those of the analytic model, as plans have them (64 MiB of workspace are assumed) and without
that. Then limits are swept around what every plan needs: who is refused, and who would have fitted. At last some plans
of 8 devices run for real, 8 processes over gloo, and the bytes of every rank are compared with those of the rank alone.

    python -m benchmarks.memory.estimates [--quick] [--measured PATH [--slices] | --both PATH] [--json PATH]

`--measured` takes the bytes from an earlier result of this benchmark, for which nothing is run again: only the model's
part, plans and estimates, is made anew. With `--slices` plans with slices are run again all the same: those whose
runtime has changed since. With `--both` a correction is learned from the runs of an earlier result, as they stand
there, and only plans with slices and recomputation are run and judged.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from argparse import Namespace
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from benchmarks.harness import Outcome, benchmark_parser, read_result, run_benchmark
from benchmarks.processes.fixed_machine import FIXED_MACHINE
from benchmarks.processes.ranks import in_ranks, join_group

RISK = 0.05
"""What a plan is refused above."""
LIMITS = {"mean error": 0.04, "under-estimates beyond the margin": 0, "refused although they fit": 0.10}
COUNT = 41
"""Limits of a sweep: evenly spaced in their logarithm from the least to the most that any plan needs, the same for all
plans; and, closer, from 0.9 to 1.1 of what each plan needs by itself."""
BASE = {
    "vocab_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
FAMILIES = {
    "llama": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"model_type": "gpt2"},
}
SCHEDULES = ("1f1b", "1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-v", "v-half", "v-min", "v-zb")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One plan."""

    family: str
    hidden: int
    layers: int
    devices: int
    sequence: int
    rows: int
    "Of a microbatch on a replica."
    microbatches: int
    replicas: int
    shards: int
    sharding: str
    schedule: str
    recompute: str
    zero1: bool
    precision: str
    slices: int


def main() -> int:
    parser = benchmark_parser(__doc__, quick="8 plans to learn from, 4 to judge, no processes")
    parser.add_argument("--measured", help="an earlier result, whose measured bytes are used again")
    parser.add_argument("--slices", action="store_true", help="with --measured: but run plans with slices again")
    parser.add_argument("--both", help="an earlier result, from which a correction is learned for plans of both alone")
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Measure plans, or take their bytes from an earlier result, and judge the estimates."""
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    warnings.simplefilter("ignore")
    sizes = {"learned": {2: 3, 4: 5}, "judged": {8: 4}, "both": {8: 2}} if arguments.quick else {
        "learned": {1: 3, 2: 9, 3: 4, 4: 17}, "judged": {8: 32, 16: 32}, "both": {8: 12, 16: 12},
    }  # fmt: skip
    path = arguments.both or arguments.measured
    before = read_result(path) if path else {}
    source = before.get("measured") or before.get("provenance")
    if arguments.both:
        learned, judged, real = before["learned"], measure_both(sizes["both"]), []
    elif arguments.measured:
        learned, judged = (again(before[name], arguments.slices) for name in ("learned", "judged"))
        real = before["real"]
    else:
        learned = [run for devices, count in sizes["learned"].items() for run in measure(devices, count, 2)]
        judged = [run for devices, count in sizes["judged"].items() for run in measure(devices, count, 1)]
        judged += measure_both(sizes["both"])
        real = [] if arguments.quick else compare_with_processes()
    result = {**judge(learned, judged), "real": real, "limits": LIMITS, "risk": RISK}
    result["measured"] = source
    result["measured again"] = [run["plan"] for run in (*learned, *judged) if run.pop("anew", False)]
    print_table(result)
    figures = result["figures"]["corrected"]
    close = all(figures[name] <= limit for name, limit in LIMITS.items())
    return Outcome(result, passed=close and all(one["largest_difference"] <= 0.002 for one in real))


def draw(random: np.random.Generator, devices: int, both: bool = False) -> Case:
    """A case that may be impossible to plan. `both`: slices and recomputation, if it is one of several lanes."""

    def one(*choices: Any) -> Any:
        return choices[int(random.integers(len(choices)))]

    from pipefit.schedule import FAMILIES as SCHEDULE_FAMILIES

    shards = one(1, 1, 1, 2) if devices > 1 else 1
    replicas = one(*(r for r in (1, 1, 2, 4) if devices % (r * shards) == 0)) if devices % shards == 0 else 1
    lanes = devices // (shards * replicas)
    schedule = one(*SCHEDULES) if lanes > 1 and not both else "1f1b"
    stages = len(SCHEDULE_FAMILIES[schedule].placement(lanes))
    small = devices <= 4
    recompute = one("none", "none", "selective", "full") if not both else one("selective", "full")
    cut = schedule == "1f1b" and lanes > 1 and recompute == "none"
    return Case(
        family=one(*FAMILIES),
        hidden=64 if small else one(64, 96, 128),
        layers=max(6 if small else 16, stages),
        devices=devices,
        sequence=one(64, 128, 256),
        rows=one(1, 1, 2),
        microbatches=lanes * one(1, 2),
        replicas=replicas,
        shards=shards,
        sharding="none" if shards == 1 else one("megatron", "megatron-sp"),
        schedule=schedule,
        recompute=recompute,
        zero1=replicas > 1 and one(True, False),
        precision=one("float32", "float32", "bfloat16"),
        slices=one(2, 4) if both and lanes > 1 else 2 if cut and one(False, False, True) else 1,
    )


def measure(devices: int, count: int, ranks: int, both: bool = False) -> list[dict[str, Any]]:
    """`count` plans on so many devices: of the `ranks` fullest ones of each, the case, the parts and the bytes. `both`:
    only plans with slices and recomputation."""
    import torch

    from pipefit.errors import PipefitError
    from pipefit.plan.risk import peak_parts
    from pipefit.run.verify.record import run_configuration
    from pipefit.run.verify.verify import critical_ranks, measure_rank
    from pipefit.run.worker.worker import device_lane

    random, runs, seen = np.random.default_rng([devices, 1] if both else devices), [], set()
    while len(seen) < count:
        case = draw(random, devices, both)
        if both and case.slices == 1:
            continue
        try:
            plan, model, simulation = plan_of(case)
        except PipefitError:
            continue
        if run_configuration(plan) in seen:
            continue
        seen.add(run_configuration(plan))
        parts = peak_parts(simulation)
        for rank in critical_ranks(plan, ranks):
            lane = device_lane(plan, plan.used_devices[rank])
            peak = measure_rank(plan, model, rank, torch.device("cpu"), 1).largest_bytes
            gc.collect()
            runs.append(
                {
                    "case": asdict(case),
                    "plan": run_configuration(plan),
                    "rank": rank,
                    "parts": parts[lane],
                    "bytes": peak,
                }
            )
        print(f"\r{devices} devices: {len(seen)} of {count} plans", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return runs


def measure_both(counts: dict[int, int]) -> list[dict[str, Any]]:
    """So many plans with slices and recomputation, by number of devices."""
    return [run for devices, count in counts.items() for run in measure(devices, count, 1, both=True)]


def has_both(run: dict[str, Any]) -> bool:
    """Whether a plan has slices and recomputation."""
    return run["case"]["slices"] > 1 and run["case"]["recompute"] != "none"


def again(runs: list[dict[str, Any]], slices: bool = False) -> list[dict[str, Any]]:
    """The same plans, ranks and measured bytes, with the parts that the model gives them now. With `slices` the bytes
    of plans with slices are measured anew."""
    import torch

    from pipefit.plan.risk import peak_parts
    from pipefit.run.verify.record import run_configuration
    from pipefit.run.verify.verify import measure_rank
    from pipefit.run.worker.worker import device_lane

    result = []
    for run in runs:
        plan, model, simulation = plan_of(Case(**run["case"]))
        parts = peak_parts(simulation)[device_lane(plan, plan.used_devices[run["rank"]])]
        kept = {name: run[name] for name in ("case", "plan", "rank", "bytes")}
        if slices and run["case"]["slices"] > 1:
            peak = measure_rank(plan, model, run["rank"], torch.device("cpu"), 1).largest_bytes
            gc.collect()
            kept |= {"plan": run_configuration(plan), "bytes": peak, "anew": True}
        assert run_configuration(plan) == kept["plan"], "the case gives another plan than the one that was measured"
        result.append(kept | {"parts": parts})
    return result


@lru_cache(maxsize=64)
def model_of(family: str, hidden: int, layers: int) -> Any:
    """The captured model."""
    from pipefit.model.capture.layers import capture_family
    from pipefit.model.registry import describe_config

    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden + hidden // 2, "num_hidden_layers": layers}
    sizes["head_dim"] = hidden // BASE["num_attention_heads"]
    config = {**BASE, **sizes, **FAMILIES[family]}
    if family == "gpt2":
        config = {
            "model_type": "gpt2", "vocab_size": 1024, "n_positions": 256, "n_embd": hidden, "n_layer": layers,
            "n_head": 4, "attn_pdrop": 0.0,
        }  # fmt: skip
    described = describe_config(config, family, family)
    return capture_family(described.family, described.config)


def plan_of(case: Case) -> tuple[Any, Any, Any]:
    """(plan with its prediction, model, simulation). Raises PipefitError where such a plan cannot be."""
    from pipefit.cluster import local_cluster
    from pipefit.plan.assemble.predict import add_prediction, simulate_plan
    from pipefit.plan.evaluate.planner_context import build_plan
    from pipefit.plan.request.decisions import ParallelConfig
    from pipefit.plan.types import Job
    from pipefit.schedule import FAMILIES as SCHEDULE_FAMILIES

    model, cluster = model_of(case.family, case.hidden, case.layers), local_cluster(case.devices, FIXED_MACHINE)
    lanes = case.devices // (case.replicas * case.shards)
    placement = SCHEDULE_FAMILIES[case.schedule].placement(lanes)
    layers, stages = len(model.layers), len(placement)
    decisions = ParallelConfig(
        cuts=tuple(round(stage * layers / stages) for stage in range(1, stages)),  # even, whatever layers cost here
        placement=() if len(placement) == lanes else placement,
        replicas=(1,) * case.replicas,
        shards=(1,) * case.shards,
        sharding=case.sharding,
        microbatches=case.microbatches,
        schedule=case.schedule,
        recompute=(case.recompute,),
        sharded_state="optimizer" if case.zero1 else "none",
        slices=() if case.slices == 1 else (case.sequence // case.slices,) * case.slices,
    )
    batch = case.rows * case.replicas * case.microbatches
    plan = build_plan(model, cluster, Job(batch=batch, sequence=case.sequence, precision=case.precision), decisions)
    simulation = simulate_plan(plan, model, cluster)
    return add_prediction(plan, model, simulation), model, simulation


def judge(learned: list[dict[str, Any]], judged: list[dict[str, Any]]) -> dict[str, Any]:
    """Learn from the ones, estimate the others: errors, margins, and who is refused where limits are swept."""
    from pipefit.cost.memory.correction import MemoryRun, learn_correction
    from pipefit.cost.static_memory import WORKSPACE_BYTES

    runs = [
        MemoryRun(
            configuration=run["plan"], kind="cpu", devices=run["case"]["devices"], rank=run["rank"],
            parts=run["parts"], measured_bytes=float(run["bytes"]),
        )
        for run in learned
    ]  # fmt: skip
    correction = learn_correction(runs, "cpu")
    estimates = [correction.estimate_rank(run["parts"]) for run in judged]
    bytes_ = np.array([run["bytes"] for run in judged], dtype=float)
    raw = np.array([sum(run["parts"].values()) for run in judged])
    corrected = np.array([one.expected_bytes for one in estimates])
    margins = np.array([one.margin_bytes for one in estimates])
    sweeps = (
        np.broadcast_to(np.geomspace(bytes_.min(), bytes_.max(), COUNT), (len(bytes_), COUNT)),
        bytes_[:, None] * np.linspace(0.9, 1.1, COUNT),
    )
    risky = [
        np.array(
            [[one.oom_probability(limit) > RISK for limit in row] for one, row in zip(estimates, sweep, strict=True)]
        )
        for sweep in sweeps
    ]
    for run, one in zip(judged, estimates, strict=True):
        run |= {"expected": one.expected_bytes, "margin": one.margin_bytes, "distance": one.distance}
    bare, none = raw - WORKSPACE_BYTES, np.zeros(len(raw))
    above = [[value[:, None] > sweep for sweep in sweeps] for value in (raw, bare)]
    errors = np.abs(corrected / bytes_ - 1)
    devices = np.array([run["case"]["devices"] for run in judged])
    sliced = np.array([*map(has_both, judged)])
    return {
        "correction": {
            "coefficients": dict(correction.coefficients),
            "spread": correction.spread,
            "plans": correction.configurations,
            "runs": len(runs),
            "most_devices": correction.most_devices,
        },
        "figures": {
            "analytic": figures(raw, none, bytes_, sweeps, above[0]),
            "analytic, without the assumed workspace": figures(bare, none, bytes_, sweeps, above[1]),
            "corrected": figures(corrected, margins, bytes_, sweeps, risky),
        },
        "sliced_and_recomputed": {
            "runs": int(sliced.sum()),
            **{
                name: {
                    "mean error": float(np.abs(of / bytes_ - 1)[sliced].mean()),
                    "largest under-estimate": float((1 - of / bytes_)[sliced].max(initial=0.0)),
                    "largest over-estimate": float((of / bytes_ - 1)[sliced].max(initial=0.0)),
                }
                for name, of in (("analytic, without the assumed workspace", bare), ("corrected", corrected))
            },
        },
        "by_devices": {str(count): float(errors[devices == count].mean()) for count in np.unique(devices)},
        "learned": learned,
        "judged": judged,
    }


def figures(expected: Any, margins: Any, measured: Any, sweeps: Any, refused: Any) -> dict[str, float]:
    """Errors of estimates; of the pairs (plan, limit) of both sweeps, who is refused wrongly, who is let through."""
    errors = expected / measured - 1
    fits = [measured[:, None] <= sweep for sweep in sweeps]
    wrongly = [float((no & fit).sum() / max(1, no.sum())) for no, fit in zip(refused, fits, strict=True)]
    through = [float((~no & ~fit).sum() / max(1, (~no).sum())) for no, fit in zip(refused, fits, strict=True)]
    return {
        "runs": len(errors),
        "mean error": float(np.abs(errors).mean()),
        "largest under-estimate": float(max(0.0, -errors.min())),
        "largest over-estimate": float(max(0.0, errors.max())),
        "mean margin": float((margins / measured).mean()),
        "under-estimates beyond the margin": int((measured > expected + margins).sum()),
        "refused although they fit": wrongly[0],
        "refused although they fit, limits within 10 %": wrongly[1],
        "accepted although they do not fit": through[0],
        "accepted although they do not fit, limits within 10 %": through[1],
    }


REAL = (
    Case(
        family="llama", hidden=64, layers=16, devices=8, sequence=128, rows=1, microbatches=8, replicas=1, shards=1,
        sharding="none", schedule="v-half", recompute="none", zero1=False, precision="float32", slices=1,
    ),
    Case(
        family="gpt2", hidden=64, layers=16, devices=8, sequence=128, rows=1, microbatches=8, replicas=2, shards=1,
        sharding="none", schedule="1f1b", recompute="selective", zero1=False, precision="float32", slices=1,
    ),
    Case(
        family="mixtral", hidden=64, layers=16, devices=8, sequence=128, rows=1, microbatches=8, replicas=1, shards=1,
        sharding="none", schedule="zb-h1", recompute="none", zero1=False, precision="float32", slices=1,
    ),
)  # fmt: skip


def compare_with_processes() -> list[dict[str, Any]]:
    """Every rank of some plans among 8 processes, and alone."""
    import torch

    from pipefit.run.verify.verify import measure_rank

    plans = [plan_of(case)[:2] for case in REAL]
    real: list[list[int]] = in_ranks(rank_main, 8, plans)
    result = []
    for case, (plan, model), together in zip(REAL, plans, real, strict=True):
        alone = [measure_rank(plan, model, rank, torch.device("cpu"), 1).largest_bytes for rank in range(8)]
        largest = max(abs(a / b - 1) for a, b in zip(alone, together, strict=True))
        result.append({"case": asdict(case), "alone": alone, "together": together, "largest_difference": largest})
    return result


def rank_main(rank: int, devices: int, port: int, plans: list[Any], queue: Any) -> None:
    """One rank of the real runs."""
    import torch
    import torch.distributed as dist

    from pipefit.run.transfers.comms import CommGroups
    from pipefit.run.verify.verify import count_on_cpu, work_phases

    join_group(rank, devices, port)
    comms, found = CommGroups(), []
    for plan, model in plans:
        peak = count_on_cpu(work_phases(plan, model, torch.device("cpu"), 1, comms)).largest_bytes
        everyone: list[Any] = [None] * devices
        dist.all_gather_object(everyone, peak)
        found.append(everyone)
    if rank == 0:
        queue.put(found)
    dist.barrier()
    dist.destroy_process_group()


def print_table(result: dict[str, Any]) -> None:
    known = result["correction"]
    print(f"learned from {known['plans']} plans ({known['runs']} ranks) of at most {known['most_devices']} devices")
    print("  " + ", ".join(f"{name} {value:.3f}" for name, value in known["coefficients"].items()))
    heads = f"{'mean error':>11}{'under by':>10}{'over by':>10}{'beyond':>8}{'refused, fit':>14}{'within 10 %':>13}"
    heads += f"{'let through':>13}{'within 10 %':>13}"
    print(" " * 42 + heads)
    for name, one in result["figures"].items():
        print(
            f"{name:<42}{one['mean error']:>11.2%}{one['largest under-estimate']:>10.2%}"
            f"{one['largest over-estimate']:>10.1%}{one['under-estimates beyond the margin']:>8}"
            f"{one['refused although they fit']:>14.1%}{one['refused although they fit, limits within 10 %']:>13.1%}"
            f"{one['accepted although they do not fit']:>13.1%}"
            f"{one['accepted although they do not fit, limits within 10 %']:>13.1%}"
        )
    for devices, error in result["by_devices"].items():
        count = sum(run["case"]["devices"] == int(devices) for run in result["judged"])
        print(f"{count} plans of {devices} devices: mean error {error:.2%}")
    both = result["sliced_and_recomputed"]
    print(
        f"{both['runs']} plans with slices and recomputation: mean error {both['corrected']['mean error']:.2%}, "
        f"{both['corrected']['largest under-estimate']:.2%} under at most"
    )
    for one in result["real"]:
        case = one["case"]
        words = f"{case['family']}, {case['schedule']}, {case['replicas']} replicas"
        print(f"8 processes, {words}: alone and together differ by {one['largest_difference']:.3%} at most")


if __name__ == "__main__":
    sys.exit(main())
