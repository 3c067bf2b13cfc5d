"""How well do curves through fewer than 40 points predict points that were not measured for them?

For every distinct layer of some models: measure the points of a profile and, interleaved with them in the same
shuffled rounds, random points that the fit never sees (other rows, lengths and contexts, which come in other numbers of
earlier slices); fit; compare. Slices with a context are also told by themselves. The times are
those of `pipefit profile` with one process: forward, fused backward, input and weight gradient apart. Where all layers
of a model are measured, the sum of their curves is also compared with the whole model run as one stage.

    python -m benchmarks.profiling.compute_curves --json benchmarks/results/compute_curves.json
    python -m benchmarks.profiling.compute_curves --quick
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.harness import Outcome, benchmark_parser, report_progress, run_benchmark
from pipefit.cluster.measured import LayerCurve
from pipefit.cost.compute.curves import digest_graph, layer_times
from pipefit.model.registry import open_model
from pipefit.profile.layer_phase import distinct_layers, layer_curve
from pipefit.profile.layers import (
    LayerBench,
    PointSamples,
    ProfiledLayer,
    StageBench,
    action_overhead,
    survey_points,
    typical_times,
)
from pipefit.profile.points import SMALLEST, WorkPoint, first_points, refine_points
from pipefit.run.session.rendezvous import choose_device
from pipefit.run.stage.program import StageLayer

SHORT_S = 100e-6
"""Errors of shorter actions are given as shares of this: they hardly count, and a share of a microsecond is noise."""

GRID = 8
"""Tokens of which unseen slices are multiples."""

MOST_EARLIER = 8
"""Slices before one that is measured as an unseen point."""

WHOLE = (WorkPoint(1, 256), WorkPoint(2, 256), WorkPoint(4, 256), WorkPoint(8, 96), WorkPoint(5, 160))
"""Where a whole model is compared with the sum of its layers."""

FIELDS = {"F": "forward_s", "I": "input_s", "W": "weight_s", "B": "fused_s"}


def unseen_points(subject: ProfiledLayer, count: int, sequence: int, tokens: int, seed: int) -> list[WorkPoint]:
    """Random sizes within the measured range. Half of those with attention are slices with a context, on the grid on
    which slices are cut (TeraPipe's is as fine)."""
    draw = random.Random(seed)
    attention = any(operator.kind == "attention" for operator in subject.graph.operators)
    points = []
    while len(points) < count:
        if attention and len(points) % 2:
            length = GRID * draw.randint(SMALLEST // GRID, sequence // GRID - 1)
            past = GRID * draw.randint(1, (sequence - length) // GRID)
            earlier = min(draw.randint(1, MOST_EARLIER), max(1, past // SMALLEST))
        else:
            length, past, earlier = draw.randint(SMALLEST, sequence), 0, 1
        points.append(WorkPoint(draw.randint(1, max(1, tokens // length)), length, past, earlier))
    return points


def measure(
    arguments: Namespace, subjects: Sequence[ProfiledLayer], device: torch.device
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A record for each layer (points, fit error, predicted and measured times at unseen points) and whole model."""
    sequence, tokens = arguments.sequence, arguments.tokens
    benches = [LayerBench(subject, device) for subject in subjects]
    costs = action_overhead(subjects[0].dtype, device)
    samples = [
        PointSamples(index, point)
        for index, subject in enumerate(subjects)
        for point in first_points(subject.graph, sequence, tokens)
    ]
    survey_points(benches, samples, 1)
    for sample in samples:
        sample.visits.clear()
    survey_points(benches, samples, 2, progress=report_progress("first look"))
    for index in range(len(subjects)):
        own = [sample for sample in samples if sample.subject == index]
        whole_s = [sum(typical_times(sample.visits)[0].values()) for sample in own]
        samples += [PointSamples(index, p) for p in refine_points([sample.point for sample in own], whole_s, sequence)]
    for sample in samples:  # the fastest of more visits would be faster than those of the unseen points
        sample.visits.clear()
    hidden = [
        PointSamples(index, point)
        for index, subject in enumerate(subjects)
        for point in unseen_points(subject, arguments.unseen, sequence, tokens, seed=1000 * arguments.seed + index)
    ]
    progress = report_progress("measuring")
    survey_points(benches, samples + hidden, arguments.rounds, seed=1, again=arguments.rounds, progress=progress)
    if arguments.samples:
        write_samples(arguments.samples, subjects, samples, hidden, costs)
    records, curves = [], []
    for index, subject in enumerate(subjects):
        seen = [sample for sample in samples if sample.subject == index]
        curves.append(layer_curve(subject, seen, device.type, costs, 1))
        records.append(compare(subject, curves[-1], [s for s in hidden if s.subject == index], costs))
    return records, whole_models(arguments.model, curves, costs, device, arguments.rounds)


def write_samples(
    path: str,
    subjects: Sequence[ProfiledLayer],
    seen: Sequence[PointSamples],
    hidden: Sequence[PointSamples],
    costs: dict[str, float],
) -> None:
    """Every visit's times, for trying other fits on the same measurements: seconds by action, ascending, of each point
    ([rows, tokens, past, earlier])."""
    points = [
        {
            "layer": subjects[sample.subject].name,
            "point": list(sample.point),
            "unseen": place >= len(seen),
            "seconds": {action: sample.undisturbed_times(action) for action in FIELDS},
        }
        for place, sample in enumerate((*seen, *hidden))
    ]
    Path(path).write_text(json.dumps({"overhead_s": costs, "points": points}), encoding="utf-8")


def whole_models(
    models: Sequence[str], curves: Sequence[LayerCurve], costs: dict[str, float], device: torch.device, rounds: int
) -> list[dict[str, Any]]:
    """For every model whose layers were all measured: all of it as one stage, beside the sum of its layers' curves."""
    known = {curve.signature: curve for curve in curves}
    records = []
    for source in models:
        model = open_model(source)
        own = [known.get(digest_graph(model.layer_graph(layer))) for layer in model.layers]
        if None in own:
            continue
        stage = [StageLayer(layer.name, model.layer_graph(layer), layer.parameters) for layer in model.layers]
        samples = [PointSamples(0, point) for point in WHOLE]
        survey_points([StageBench(stage, curves[0].dtype, device)], samples, rounds, again=rounds)
        points = []
        for sample in samples:
            each = [layer_times(curve, *sample.point) for curve in own if curve is not None]
            predicted = {a: sum(getattr(t, field) for t in each) + costs.get(a, 0.0) for a, field in FIELDS.items()}
            measured, spread = typical_times(sample.visits)
            where = {"rows": sample.point.rows, "tokens": sample.point.tokens, "past": 0, "earlier": 1}
            points.append(where | {"measured_s": measured, "spread": spread, "predicted_s": predicted})
        record = {"model": source, "unseen": points}
        records.append(record | {"errors": {a: describe(errors(record, a)) for a in (*FIELDS, "F+B")}})
    return records


def compare(
    subject: ProfiledLayer, curve: LayerCurve, hidden: Sequence[PointSamples], costs: dict[str, float]
) -> dict[str, Any]:
    points = []
    for sample in hidden:
        measured, spread = typical_times(sample.visits)
        predicted = layer_times(curve, *sample.point)
        points.append(
            {
                "rows": sample.point.rows,
                "tokens": sample.point.tokens,
                "past": sample.point.past,
                "earlier": sample.point.earlier,
                "measured_s": measured,
                "spread": spread,
                "noise": noise(sample),
                "predicted_s": {a: getattr(predicted, field) + costs.get(a, 0.0) for a, field in FIELDS.items()},
            }
        )
    record = {
        "layer": subject.name,
        "dtype": subject.dtype,
        "measured_points": len(curve.points),
        "fit_error": curve.fit_error,
        "unseen": points,
    }
    actions = (*FIELDS, "F+B")
    record |= {"errors": {action: describe(errors(record, action)) for action in actions}}
    if any(point["past"] for point in points):
        record["with_context"] = {action: describe(errors(record, action, context=True)) for action in actions}
    return record


def errors(record: dict[str, Any], action: str, context: bool = False) -> list[float]:
    """Errors at the unseen points, or at those with a context: relative where the action takes at least `SHORT_S`, else
    relative to `SHORT_S`."""
    found = []
    for point in record["unseen"]:
        if context and not point["past"]:
            continue
        predicted, measured = (
            sum(point[side][name] for name in action.split("+")) for side in ("predicted_s", "measured_s")
        )
        found.append(abs(predicted - measured) / max(measured, SHORT_S))
    return found


def noise(sample: PointSamples) -> float:
    """How far two halves of the visits are apart, of F and B together: what an error may owe to the measuring."""
    halves = [typical_times(sample.visits[start::2])[0] for start in (0, 1)] if len(sample.visits) > 1 else []
    whole_s = [times["F"] + times["B"] for times in halves]
    return max(whole_s) / min(whole_s) - 1 if whole_s else 0.0


def describe(errors: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(errors), "median": statistics.median(errors), "max": max(errors)}


def main() -> int:
    parser = benchmark_parser(__doc__, quick="the tiny model alone, few rounds")
    parser.add_argument("--model", action="append", help="whose layers; repeatable (default: tiny and gpt2)")
    parser.add_argument("--layers", default="of tiny$|layers.0 of", help="regular expression of the layers' names")
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the largest microbatch")
    parser.add_argument("--unseen", type=int, default=12, help="random points for each layer")
    parser.add_argument("--seed", type=int, default=6, help="of the random points")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="")
    parser.add_argument("--samples", help="write every visit's times here")
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Measure and fit all layers, and compare with points that the fit does not see."""
    if arguments.quick:
        arguments.model, arguments.rounds = arguments.model or ["tiny"], 3
    arguments.model = arguments.model or ["tiny", "gpt2"]
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    device = choose_device(arguments.device, 0)
    dtype = arguments.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    found, _ = distinct_layers(arguments.model, dtype)
    subjects = [subject for subject in found if re.search(arguments.layers, subject.name)]
    start = time.monotonic()
    layers, models = measure(arguments, subjects, device)
    total = [error for layer in layers for action in FIELDS for error in errors(layer, action)]
    attending = [layer for layer in layers if "with_context" in layer]
    sliced = {action: [e for each in attending for e in errors(each, action, context=True)] for action in FIELDS}
    result = {
        "device": device.type,
        "seed": arguments.seed,
        "threads": torch.get_num_threads(),
        "how": "own processor time on CPU (events on GPU); median of a visit's calls, fastest of the visits; "
        "points that the fit sees and those it does not are shuffled together anew in every round",
        "seconds": round(time.monotonic() - start, 1),
        "error": f"(predicted - measured) / measured, or / {SHORT_S * 1e6:.0f} us for shorter actions",
        "overall": describe(total),
        "with_context": {action: describe(each) for action, each in sliced.items()},
        "layers": layers,
        "whole_models": models,
    }
    for layer in layers:
        print(f"{layer['layer']:24} {layer['measured_points']:2} points  {by_action(layer['errors'])}")
    for layer in attending:
        print(f"{layer['layer']:24} slices     {by_action(layer['with_context'])}")
    for record in models:
        print(f"all of {record['model']:17} as a stage  {by_action(record['errors'])}")
    apart = statistics.fmean(point["noise"] for layer in layers for point in layer["unseen"])
    print(
        f"all layers and actions at unseen points: mean {describe(total)['mean']:.1%}, max {max(total):.1%}; "
        f"two halves of the visits of a point are {apart:.1%} apart on average"
    )
    return Outcome(result)


def by_action(errors: Mapping[str, Mapping[str, float]]) -> str:
    """Errors of every action in a line."""
    return "  ".join(f"{name} {each['mean']:5.1%} (max {each['max']:5.1%})" for name, each in errors.items())


if __name__ == "__main__":
    sys.exit(main())
