"""Slices in a lab: eight emulated devices as eight stages, two and four sequences, real processes and messages.

The cluster (benchmarks/data/clusters/token-slices.json, written before anything was run) is measured by `pipefit
profile`; the planner knows nothing else. Its devices skip what a causal mask hides, so that the slices of a sequence
cost together what the sequence costs, and what each of them costs anew. Two sequences:

- the schedules without slices: GPipe, 1F1B, interleaved 1F1B with two stages a lane;
- ours: the planner's plan on one pipeline of all devices;
- uniform slices: of several counts, in the schedule of our plan, 1F1B and GPipe, those that the simulator likes best;
- TeraPipe: its dynamic program on the measured curves, all forwards first; and slice-1F1B with slices of equal cost.

Four sequences: slice-1F1B beside all forwards first, with the memory that the processes really had.
`python -m benchmarks.token_slices.lab` writes the cluster's file again (a test compares it).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.harness import TextTable
from benchmarks.lab.clusters import lab
from benchmarks.lab.runs import CLUSTERS, Measured, lab_of, profiled, run_plans
from benchmarks.token_slices.overhead import overhead_of
from benchmarks.token_slices.targets import at_least, at_most
from pipefit.cluster import Cluster
from pipefit.codec import dump_text
from pipefit.cost.compute.curves import action_times_s, digest_graph, find_layer
from pipefit.cost.pipeline.table import ACTION_OVERHEAD_S
from pipefit.lab.lifecycle import Lab
from pipefit.lab.pace import layer_facts
from pipefit.lab.spec import LabFile
from pipefit.lab.tables import DeviceTable
from pipefit.model.capture.layers import capture_family
from pipefit.model.graph import Graph, Model
from pipefit.model.registry import describe_config
from pipefit.plan.assemble.predict import add_prediction, simulate_plan
from pipefit.plan.evaluate.planner_context import PlannerContext, build_plan
from pipefit.plan.passes.reslice import reslice_best
from pipefit.plan.passes.search import search_plans
from pipefit.plan.request.constraints import Constraints
from pipefit.plan.request.decisions import ParallelConfig
from pipefit.plan.slicing.cuts import equal_cost, uniform_slices
from pipefit.plan.slicing.refine import refine_slices
from pipefit.plan.slicing.terapipe import best_slicing
from pipefit.plan.types import Job, Plan
from pipefit.schedule.problem import looped_placement as looped

LAB = "token-slices"
LANES, BLOCKS, SEQUENCE = 8, 16, 768
GRID, OURS = 8, 2
"""Tokens of which TeraPipe's slices are multiples, and all others: emulated devices have no tiles."""

COUNTS = (6, 8, 10, 12, 14, 16, 20, 24, 32)
"""Of uniform slices, that are tried in the simulator."""

UNIFORM = 3
"""Plans with uniform slices that are run."""

SEARCHED = 40
"""Slicings that the local search judges."""

FLOPS = 1.25e9


def measure(quick: bool = False) -> dict[str, Any]:
    """The whole section."""
    model = model_of()
    steps = 1 if quick else 2
    with lab_of(LAB) as place:
        cluster = profiled(place, model, SEQUENCE, quick=quick, tokens=SEQUENCE)
        two, four = plans_for_two(model, cluster, quick), plans_for_four(model, cluster)
        runs = runs_of(place, two, model, steps)
        more = run_plans(place, list(four.values()), model, steps=steps, trace=True, count_bytes=True)
        runs_of_four = dict(zip(four, more, strict=True))
    return {
        "lab": LAB,
        "stages": LANES,
        "sequence": SEQUENCE,
        "attention_over_linear": attention_share(model),
        "slice_overhead_s": overhead_of(SEQUENCE, 16, StageTimes(model, cluster), GRID),
        "stage_s": float(StageTimes(model, cluster)(np.array([SEQUENCE]), np.array([0]))[0]),
        **of_two(two, runs),
        **of_four(four, runs_of_four),
    } | {"targets": targets(two, runs, four, runs_of_four)}


def runs_of(place: Lab, plans: Mapping[str, Plan], model: Model, steps: int) -> dict[str, Measured]:
    """Of every plan; those without slices, whose steps are long, take one."""
    found: dict[str, Measured] = {}
    for sliced, count in ((True, steps), (False, 1)):
        names = [name for name, plan in plans.items() if (len(plan.order.slices) > 1) == sliced]
        runs = run_plans(place, [plans[name] for name in names], model, steps=count) if names else []
        found |= dict(zip(names, runs, strict=True))
    return found


def lab_file() -> LabFile:
    """Four hosts of two devices. A launch costs a millisecond where a sequence's slice costs tens of them."""
    rates = {"fast": FLOPS}
    made = lab(LAB, ["fast"] * 4, [[2e7 if a != b else 0.0 for b in range(4)] for a in range(4)], rates)
    table = DeviceTable(
        flops_per_s=FLOPS, memory_bytes_per_s=FLOPS / 2, knee_tokens=2.0, masked_share=0.0, layer_s=1e-4,
        action_s=1e-3, jitter=0.01,
    )  # fmt: skip
    return replace(made, devices={"fast": table})


def model_of() -> Model:
    """A Llama of width 64, two blocks a lane, whose attention is as much work as its products."""
    config = {
        "model_type": "llama", "vocab_size": 16, "hidden_size": 64, "intermediate_size": 192,
        "num_hidden_layers": BLOCKS, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
        "max_position_embeddings": SEQUENCE, "tie_word_embeddings": False,
    }  # fmt: skip
    described = describe_config(config, "small", "the lab's model of long sequences")
    return capture_family(described.family, described.config)


def block_of(model: Model) -> Graph:
    """The graph of its blocks."""
    return next(graph for graph in model.graphs.values() if any(op.kind == "attention" for op in graph.operators))


def attention_share(model: Model) -> float:
    """FLOPs of attention, what the mask hides left out, over those of all products: forward, whole sequence."""
    facts = layer_facts(block_of(model), {"B": 1, "T": SEQUENCE, "P": 0, "S": SEQUENCE})["F"]
    return facts.attention_flops * (1 - facts.masked) / facts.dense_flops


class StageTimes:
    """Seconds of a slice on a lane, forward and backward together, by the measured curves: a `TimeOf`."""

    def __init__(self, model: Model, cluster: Cluster) -> None:
        assert cluster.measured is not None
        curve = find_layer(cluster.measured, digest_graph(block_of(model)), cluster.hosts[0].kind, "float32")
        assert curve is not None, "the profile measured the blocks"
        self.actions = [curve.actions[name] for name in "FB"]
        known = cluster.measured.overhead_s[cluster.hosts[0].kind]
        self.once_s = known["F"] + known["B"] + 2 * ACTION_OVERHEAD_S

    def __call__(self, tokens: Any, past: Any) -> Any:
        each = sum(action_times_s(curve, np.ones_like(tokens), tokens, past) for curve in self.actions)
        return BLOCKS // LANES * each + self.once_s


def plans_for_two(model: Model, cluster: Cluster, quick: bool) -> dict[str, Plan]:
    """By name, ours first."""
    job = Job(batch=2, sequence=SEQUENCE, precision="float32")
    maker = Maker(model, cluster, job)
    found = {"ours": planned(model, cluster, job)}
    found |= {name: maker.plan(name) for name in ("gpipe", "1f1b", "interleaved-1f1b")}
    family, count = found["ours"].order.name, max(2, len(found["ours"].order.slices))
    times = StageTimes(model, cluster)
    found["terapipe"] = maker.plan("gpipe", best_slicing(SEQUENCE, LANES, times, multiple=GRID, sequences=2).slices)
    found["1f1b, equal cost"] = maker.plan("1f1b", equal_cost(SEQUENCE, count, times, OURS))
    families = [name for name in dict.fromkeys((family, "interleaved-1f1b", "1f1b", "gpipe")) if name in maker.known]
    even = {
        f"{name}, {count} equal": maker.plan(name, uniform_slices(SEQUENCE, count, OURS))
        for name, count in itertools.product(families, COUNTS)
    }
    best = sorted(even, key=lambda name: predicted_s(even[name]))[: 1 if quick else UNIFORM]
    return found | {name: even[name] for name in best}


def plans_for_four(model: Model, cluster: Cluster) -> dict[str, Plan]:
    """All forwards first, as TeraPipe slices; and slice-1F1B."""
    maker, times = (
        Maker(model, cluster, Job(batch=4, sequence=SEQUENCE, precision="float32")),
        StageTimes(model, cluster),
    )
    slices = best_slicing(SEQUENCE, LANES, times, multiple=GRID, sequences=4).slices
    return {
        "all forwards": maker.plan("gpipe", slices),
        "slice-1F1B": maker.refined("1f1b", equal_cost(SEQUENCE, len(slices), times, OURS)),
    }


CONSTRAINTS = Constraints(replicas=(1,), devices=LANES, recompute=("none",), mapping="hostname")
"""One pipeline of all devices; nothing is recomputed, as in TeraPipe."""


def planned(model: Model, cluster: Cluster, job: Job) -> Plan:
    """What the planner finds."""
    context = PlannerContext(model, cluster)
    one = reslice_best(context, job, CONSTRAINTS, search_plans(context, job, CONSTRAINTS, top=1)).fitting[0]
    plan = context.assemble_plan(one.parts, one.decisions, one.simulation.timeline.schedule)
    return add_prediction(plan, model, one.simulation)


class Maker:
    """Plans on the layout that all have in common: eight lanes, one sequence a microbatch, layers cut evenly."""

    def __init__(self, model: Model, cluster: Cluster, job: Job) -> None:
        self.model, self.cluster, self.job = model, cluster, job
        self.context = PlannerContext(model, cluster)
        self.known = {"gpipe": 1, "1f1b": 1, "zb-h1": 1, "zb-h2": 1, "interleaved-1f1b": 2}
        "Schedules, and their stages a lane."

    def plan(self, schedule: str, slices: tuple[int, ...] = ()) -> Plan:
        """With its prediction."""
        turns = self.known[schedule]
        each = BLOCKS // (LANES * turns)
        decisions = ParallelConfig(
            stages=LANES * turns,
            cuts=tuple(1 + each * stage for stage in range(1, LANES * turns)),
            placement=looped(LANES, turns) if turns > 1 else (),
            microbatches=self.job.batch,
            schedule=schedule,
            slices=slices,
        )
        made = build_plan(self.model, self.cluster, self.job, decisions, context=self.context)
        return add_prediction(made, self.model, simulate_plan(made, self.model, self.cluster))

    def refined(self, schedule: str, start: tuple[int, ...]) -> Plan:
        """With slices found from these by local search, judged by the simulator."""

        def value_of(slices: tuple[int, ...]) -> tuple[float, float]:
            return 0.0, predicted_s(self.plan(schedule, slices))

        return self.plan(schedule, refine_slices([start], value_of, multiple=OURS, evaluations=SEARCHED).slices)


def predicted_s(plan: Plan) -> float:
    """Of its step."""
    assert plan.prediction is not None
    return plan.prediction.step_s


def limit(sequences: int, slices: int) -> float:
    """What slices can give at most: (m + K - 1) / (m + (K - 1) / s)."""
    return (sequences + LANES - 1) / (sequences + (LANES - 1) / slices)


def baseline(plans: Mapping[str, Plan], runs: Mapping[str, Measured]) -> str:
    """The best schedule without slices, as measured."""
    unsliced = [name for name in ("gpipe", "1f1b", "interleaved-1f1b") if name in plans]
    return min(unsliced, key=lambda name: runs[name].median_s)


def best_uniform(runs: Mapping[str, Measured]) -> str:
    """As measured."""
    return min((name for name in runs if name.endswith(" equal")), key=lambda name: runs[name].median_s)


def of_two(plans: Mapping[str, Plan], runs: Mapping[str, Measured]) -> dict[str, Any]:
    """What is written of two sequences."""
    base = runs[baseline(plans, runs)].median_s
    rows = [line(name, plan, runs[name]) | {"speedup": base / runs[name].median_s} for name, plan in plans.items()]
    return {"two": rows, "baseline": baseline(plans, runs), "best_uniform": best_uniform(runs)}


def of_four(plans: Mapping[str, Plan], runs: Mapping[str, Measured]) -> dict[str, Any]:
    """What is written of four sequences."""
    rows = [
        line(name, plan, runs[name])
        | {"live_tokens": live_tokens(plan, runs[name]), "activations_bytes": activations_bytes(plan, runs[name])}
        for name, plan in plans.items()
    ]
    return {"four": rows}


def line(name: str, plan: Plan, run: Measured) -> dict[str, Any]:
    """A plan, predicted and measured."""
    return {
        "name": name,
        "schedule": plan.order.name,
        "stages": len(plan.stages),
        "microbatches": plan.order.microbatches,
        "slices": list(plan.order.slices),
        "measured_s": run.median_s,
        "steps_s": list(run.step_s),
        "predicted_s": predicted_s(plan),
        "valid": run.valid,
    }


def live_tokens(plan: Plan, run: Measured) -> int:
    """The most tokens, over all stages of a lane, whose forward had begun and whose backward had not ended: of the
    fullest lane, from the traces of the run."""
    most = 0
    for spans in run.trace:
        events: list[tuple[float, int]] = []
        for text, start_s, stop_s, _ in spans:
            found = _unit(text)
            if found is not None:
                kind, slice_ = found
                size = plan.order.slices[slice_]
                events.append((start_s, size) if kind == "F" else (stop_s, -size))
        alive = np.cumsum([size for _, size in sorted(events)])
        most = max(most, int(alive.max(initial=0)))
    return most


def _unit(text: str) -> tuple[str, int] | None:
    """(F or B, slice) of a compute action that begins or ends the life of activations."""
    from pipefit.schedule.actions import parse_action

    action = parse_action(text)
    kind = "B" if action.kind in ("B", "W") else action.kind
    return (kind, action.slice) if kind in ("F", "B") else None


def activations_bytes(plan: Plan, run: Measured) -> float:
    """What the fullest process had alive beyond parameters, gradients and optimizer state."""
    assert plan.prediction is not None
    stays = [
        sum(size for part, size in lane.parts.items() if part in ("parameters", "gradients", "optimizer"))
        for lane in plan.prediction.lanes
    ]
    return max(peak - size for peak, size in zip(run.peak_bytes, stays, strict=True))


def targets(
    two: Mapping[str, Plan], runs: Mapping[str, Measured], four: Mapping[str, Plan], more: Mapping[str, Measured]
) -> list[dict[str, Any]]:
    """What issue 6 asks of the lab."""
    ours, base, even = runs["ours"], runs[baseline(two, runs)], runs[best_uniform(runs)]
    slices = len(two["ours"].order.slices)
    speedup = base.median_s / ours.median_s
    forward, steady = more["all forwards"], more["slice-1F1B"]
    live = {name: live_tokens(plan, more[name]) for name, plan in four.items()}
    held = {name: activations_bytes(plan, more[name]) for name, plan in four.items()}
    late = sum(not run.valid for run in (*runs.values(), *more.values()))
    return [
        at_least("lab, 2 sequences on 8 stages: ours over the best schedule without slices", speedup, 3.2),
        at_least(f"lab: the same as a part of the limit at {slices} slices", speedup / limit(2, slices), 0.9),
        at_least("lab: ours over the best uniform slicing", even.median_s / ours.median_s, 1.03),
        at_most(
            "lab, 4 sequences: live tokens of slice-1F1B to all forwards",
            live["slice-1F1B"] / live["all forwards"],
            0.5,
        ),
        at_most(
            "lab, 4 sequences: measured activation bytes of the same", held["slice-1F1B"] / held["all forwards"], 0.5
        ),
        at_most("lab, 4 sequences: step of slice-1F1B to all forwards", steady.median_s / forward.median_s, 1.06),
        at_most("lab: runs that did not keep to their pace", late, 0),
    ]


def show(found: Mapping[str, Any]) -> None:
    """The tables."""
    print(
        f"lab {found['lab']}: {found['stages']} stages, {found['sequence']} tokens, attention "
        f"{found['attention_over_linear']:.2f} of the products; a stage takes {found['stage_s'] * 1e3:.0f} ms a "
        f"sequence and {found['slice_overhead_s'] * 1e3:.2f} ms more for every slice"
    )
    for title, rows in (("two sequences", found["two"]), ("four sequences", found["four"])):
        table = TextTable(
            (title, "<22"), ("slices", ">7"), ("measured", ">11"), ("predicted", ">11"), ("speed-up", ">10"),
            indent="  ",
        )  # fmt: skip
        table.print_head()
        for row in rows:
            steps = f"{row['measured_s']:.3f} s", f"{row['predicted_s']:.3f} s"
            up = f"{row['speedup']:.3f}" if "speedup" in row else ""
            note = f"  {row['schedule']}{'' if row['valid'] else '  LATE'}"
            table.print_row(row["name"], len(row["slices"]), *steps, up, note=note)


if __name__ == "__main__":
    (CLUSTERS / f"{LAB}.json").write_text(dump_text(lab_file()), encoding="utf-8")
