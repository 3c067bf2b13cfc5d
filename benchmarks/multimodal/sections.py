"""Plans of multimodal models: how long planning takes, what is planned, and what plans take when they really run.

Sections, each of which can be measured again by `--only` beside the others of a result that stands:

- `closed`: modules of the sizes of DistTrain's MLLM-9B, 15B and 72B (ViT-Huge, a Llama, a generator of 1.0 B; arXiv
  2408.04275, section 7) on clusters of up to 1,296 devices with 8 in a host, laid out by the closed form alone, as the
  planner does it: every choice of modules that share devices, and layouts in line. Costs are counted from parameters
  and tokens: 2 FLOPs a parameter and token forward, twice that backward where weights are trained, at the stated
  efficiency for every count of shards. Samples differ in their images: lognormal. `planning_s` is everything that the
  short list takes, `parts_s` what parts of it take: `orchestrate_modules` all choices of who shares, `inline_names`
  layouts in line; `disjoint` would be every module on devices of its own alone.
- `plans`: whole plans of pipefit's built-in models of these sizes on 1,172 and 1,296 devices of A100-80, captured
  (needs torch), simulated, on costs from data sheets.
- `arranging`: balancing and ordering, apart and together, against random order (order.py), simulated.
- `lab`: plans of a small model really run beside monolithic layouts (lab.py; needs root).
- `few-samples`: likewise, where there are fewer samples than devices, and small modules are inefficient over shards.
- `together`: one layout really run whose encoder takes one microbatch at a time, or several.
- `arranging-lab`: one layout really run with its samples in random order, balanced, ordered, and both.

    python -m benchmarks.multimodal.sections [--quick] [--only SECTION] [--case NAME] [--cluster FOLDER] [--json PATH]
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import (
    Outcome,
    TextTable,
    benchmark_parser,
    earlier_result,
    keep_others,
    run_benchmark,
    write_result,
)
from benchmarks.multimodal.order import SETTINGS, simulated_gains
from benchmarks.provenance import provenance
from pipefit.cluster import Cluster
from pipefit.plan.modules.inline import inline_layouts
from pipefit.plan.modules.orchestrate import ModuleArrangement, OrchestrationResult, can_share, orchestrate_modules
from pipefit.plan.modules.profile import ModuleProfile, ModuleVariant
from pipefit.plan.request.constraints import Constraints
from pipefit.units import format_seconds

Rows = Iterator[dict[str, Any]]

PEAK_FLOPS_PER_S, MEMORY_BYTES, LINK_BYTES_PER_S = 312e12, 80e9, 25e9
"""Of one device: bfloat16 peak, memory, and its part of a host's ports."""

SEQUENCE, IMAGE_TOKENS = 8192, 4096
"""Tokens of a sample for the language model; image tokens of an average sample, to see and to generate."""

EFFICIENCY = {
    "large": {1: 0.62, 2: 0.61, 4: 0.59, 8: 0.55},
    "small": {1: 0.55, 2: 0.48, 4: 0.40, 8: 0.30},
}
"""Assumed: share of the peak that a module reaches on so many shards. Small modules lose more."""

MODULES = {
    "vision": (0.63e9, 32, 1280, "small"),
    "generator": (1.0e9, 28, 1152, "small"),
    "7B": (6.7e9, 32, 4096, "large"),
    "13B": (13.0e9, 40, 5120, "large"),
    "70B": (69.0e9, 80, 8192, "large"),
}
"""Parameters, layers, width, efficiency."""

CASES = {
    "MLLM-9B": ("7B", (112, 324, 648, 1172, 1296)),
    "MLLM-15B": ("13B", (112, 324, 648, 1172, 1296)),
    "MLLM-72B": ("70B", (112, 324, 648, 1172, 1296)),
}
PLANS = (
    ("mllm-9b", "162x8xA100-80:800Gbit/s", 1296, 1920, 0.5),
    ("mllm-9b", "147x8xA100-80:800Gbit/s", 1172, 1920, 0.5),
    ("mllm-15b", "162x8xA100-80:800Gbit/s", 1296, 1920, 0.5),
    ("mllm-15b", "147x8xA100-80:800Gbit/s", 1172, 1920, 0.5),
    ("mllm-72b", "162x8xA100-80:800Gbit/s", 1296, 1920, 0.5),
    ("mllm-72b", "147x8xA100-80:800Gbit/s", 1172, 1920, 0.5),
)
"""(model, cluster, devices of it at most, batch, sigma) of whole plans."""

IMAGE_SIDE = 32
"""Patches of a side of an image: an image of 1,024 tokens."""

BATCH = {112: 240, 324: 480, 648: 960, 1172: 1920, 1296: 1920}
FROZEN = {"trained": (), "vision frozen": ("vision",), "all but language frozen": ("vision", "generator")}
TOP = 60
"""Layouts on the short list, as the planner's (`plan/modules/search.py`)."""

SAVED_VALUES = 34
"""Values of the width that a layer keeps for each token (Korthikanti et al. 2022, without attention's square)."""

TABLE = TextTable(
    ("model", "<10"), ("training", "<24"), ("devices", ">8"), ("planning", ">10"), ("step", ">10"), ("  layout", "<8")
)


def main() -> int:
    parser = benchmark_parser(__doc__, quick="the closed form on one model's smallest and largest cluster")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="these sections; others stay in the result")
    parser.add_argument(
        "--case", action="append", default=[],
        help="of labs and plans, these alone, as `0.5 trained` or `mllm-9b 1296`; others stay in the result, which "
        "says of each when it was made",
    )  # fmt: skip
    parser.add_argument(
        "--cluster",
        help="a folder with what `pipefit profile` found of labs: read where it is there, else profiled and kept",
    )
    return run_benchmark(parser, measure_all)


def measure_all(arguments: Namespace) -> Outcome:
    """Measure the sections, and write the result after every row: each section has its own provenance."""
    known = earlier_result(arguments.json) if arguments.only else {}
    for name in ("closed",) if arguments.quick else (arguments.only or SECTIONS):
        cases = name in ("plans", "lab", "few-samples")
        before = known.get(name, {"rows": []}) if arguments.case and cases else {"rows": []}
        rows = [{"provenance": before["provenance"], **row} for row in before["rows"]]
        for row in SECTIONS[name](arguments):
            named = [(one.get("lab"), case_of(one)) for one in rows] if cases else []
            own = (row.get("lab"), case_of(row)) if cases else None
            at = named.index(own) if own in named else len(rows)
            rows[at : at + 1] = [row]
            known[name] = {"rows": rows, "provenance": provenance()}
            write_result(arguments.json, keep_others({}, known, SECTIONS))
    return Outcome()


def case_of(row: dict[str, Any]) -> str:
    """The name of a row of a lab, or of a plan."""
    return f"{row['model']} {row['devices']}" if "model" in row else f"{row['sigma']} {row['training']}"


def closed(arguments: Namespace) -> Rows:
    """The closed form: every model, cluster and way of training."""
    rows, quick = [], arguments.quick
    for name, (language, clusters) in ({"MLLM-72B": ("70B", (112, 1296))} if quick else CASES).items():
        for devices in clusters:
            for what, frozen in FROZEN.items():
                row = measure(language, devices, BATCH[devices], frozen, sigma=0.5, repeat=1 if quick else 5)
                rows.append({"model": name, "training": what, **row})
    print_table(rows)
    yield from rows


def plans(arguments: Namespace) -> Rows:
    """Whole plans."""
    for case in PLANS:
        if arguments.case and f"{case[0]} {case[2]}" not in arguments.case:
            continue
        one = planned(*case) | {"provenance": provenance()}
        print(
            f"{one['model']} on {one['devices']}: step {format_seconds(one['step_s'])}, utilisation "
            f"{one['utilisation']:.1%}, planned in {one['planning_s']:.0f} s, {one['decisions']}",
            flush=True,
        )
        yield one


def arranging(arguments: Namespace) -> Rows:
    """Balancing and ordering, simulated."""
    for setting in SETTINGS:
        row = dict(setting) | {"gains": simulated_gains(setting)}
        print(row, flush=True)
        yield row


def lab(arguments: Namespace) -> Rows:
    """Plans that run."""
    from benchmarks.multimodal import lab as multimodal_lab

    yield from _cases(multimodal_lab.MANY_SAMPLES, multimodal_lab.CASES, arguments)


def few_samples(arguments: Namespace) -> Rows:
    """Likewise, with fewer samples than devices."""
    from benchmarks.multimodal import lab as multimodal_lab

    yield from _cases(multimodal_lab.FEW_SAMPLES, multimodal_lab.CASES, arguments)


def _cases(setting: Any, cases: Sequence[tuple[float, str]], arguments: Namespace) -> Rows:
    from benchmarks.multimodal import lab as multimodal_lab

    asked = [one for one in cases if not arguments.case or f"{one[0]} {one[1]}" in arguments.case]
    if not asked:
        return
    cluster = _profiled(setting, arguments)
    for sigma, training in asked:
        row = multimodal_lab.case(setting, cluster, sigma, training)
        row |= {"provenance": provenance(), "profiled": cluster.provenance.when}
        multimodal_lab.show(row)
        yield row


def _profiled(setting: Any, arguments: Namespace) -> Cluster:
    """The cluster of a lab, as it was profiled before or is now."""
    from pipefit.cluster import load_cluster, save_cluster_file

    known = Path(arguments.cluster) / f"{setting.lab}.json" if arguments.cluster else None
    cluster: Cluster = load_cluster(known) if known and known.is_file() else setting.cluster()
    if known:
        save_cluster_file(cluster, known)
    return cluster


def together(arguments: Namespace) -> Rows:
    """An encoder that takes several microbatches at a time."""
    from benchmarks.multimodal import lab as multimodal_lab

    setting = multimodal_lab.MANY_SAMPLES
    cluster = _profiled(setting, arguments)
    found = multimodal_lab.together(setting, cluster, sigma=0.5) | {"profiled": cluster.provenance.when}
    for name, one in found["plans"].items():
        late = "" if one["valid"] else ", INVALID"
        print(f"{name}: {one['measured_s']:.3f} s, predicted {one['predicted_s']:.3f} s{late}", flush=True)
    yield found


def arranging_lab(arguments: Namespace) -> Rows:
    """One layout under every arrangement, really run."""
    from benchmarks.multimodal import lab as multimodal_lab

    row = multimodal_lab.arranged()
    for way, one in row["ways"].items():
        late = "" if one["valid"] else ", INVALID"
        print(f"{way:>9}: {one['measured_gain']:.3f}x, predicted {one['predicted_gain']:.3f}x{late}", flush=True)
    yield row


SECTIONS: dict[str, Callable[[Namespace], Rows]] = {
    "closed": closed,
    "plans": plans,
    "arranging": arranging,
    "lab": lab,
    "few-samples": few_samples,
    "together": together,
    "arranging-lab": arranging_lab,
}


def measure(
    language: str, devices: int, batch: int, frozen: tuple[str, ...], sigma: float, repeat: int
) -> dict[str, Any]:
    """The best layouts of one case, and how long they take to find, profiles' cuts of layers included: medians."""
    seconds: dict[str, list[float]] = {"orchestrate": [], "inline": [], "disjoint": [], "planning": []}
    processor_s: dict[str, list[float]] = {"orchestrate": [], "planning": []}
    for _ in range(repeat):
        profiles, limits = profiles_of(language, batch, frozen, sigma), (devices, batch, MEMORY_BYTES)
        passes = [np.ones((len(one.ways), len(two.ways)), dtype=np.bool_) for one, two in pairwise(profiles)]
        began, began_cpu = time.perf_counter(), time.process_time()
        found = orchestrate_modules(profiles, *limits, top=TOP, passes=passes, sharing=choices(profiles))
        between, between_cpu = time.perf_counter(), time.process_time()
        inline = inline_layouts(profiles, *limits, passes=passes)
        ended, ended_cpu = time.perf_counter(), time.process_time()
        again = profiles_of(language, batch, frozen, sigma)
        began_alone = time.perf_counter()
        orchestrate_modules(again, *limits, top=TOP, passes=passes)
        seconds["disjoint"].append(time.perf_counter() - began_alone)
        seconds["orchestrate"].append(between - began)
        seconds["inline"].append(ended - between)
        seconds["planning"].append(ended - began)
        processor_s["orchestrate"].append(between_cpu - began_cpu)
        processor_s["planning"].append(ended_cpu - began_cpu)
    median, median_cpu = (
        {name: sorted(own)[len(own) // 2] for name, own in each.items()} for each in (seconds, processor_s)
    )
    return {
        "devices": devices,
        "batch": batch,
        "sigma": sigma,
        "planning_s": median["planning"],
        "planning_processor_s": median_cpu["planning"],
        "orchestrate_processor_s": median_cpu["orchestrate"],
        "parts_s": {name: median[name] for name in ("orchestrate", "inline", "disjoint")},
        "layouts_of_modules": found.considered + inline.considered,
        "combined": found.combined + inline.combined,
        "best": best_of_each(found, inline),
    }


def choices(profiles: Sequence[ModuleProfile]) -> list[frozenset[str]]:
    """Who may share the devices of the language model."""
    able = sorted(can_share(profiles))
    return [frozenset(names) for size in range(len(able) + 1) for names in combinations(able, size)]


def best_of_each(found: OrchestrationResult, inline: OrchestrationResult) -> dict[str, dict[str, Any]]:
    """The best layout of every way of placing modules, the fastest first."""
    first: dict[str, ModuleArrangement] = {}
    for one in sorted((*found.best, *inline.best), key=lambda one: one.step_s):
        shared = " and ".join(sorted(one.guest_names))
        name = f"{shared} shared" if shared else "inline" if one.inline_names else "disjoint"
        first.setdefault(name, one)
    return {name: described(one) for name, one in first.items()}


def described(best: ModuleArrangement) -> dict[str, Any]:
    return {
        "step_s": best.step_s,
        "microbatches": best.microbatches,
        "devices_used": best.device_count,
        "modules": {
            one.module: {
                "devices": one.device_count,
                "replicas": one.replicas,
                "stages": one.stage_count,
                "shards": one.shards,
                "recompute": one.recompute,
                "placement": "shared" if one.shared else "inline" if one.inline else "disjoint",
            }
            for one in best.modules
        },
    }


def profiles_of(language: str, batch: int, frozen: tuple[str, ...], sigma: float) -> list[ModuleProfile]:
    """The three modules; `frozen` ones have no weight gradients, and no backward where nothing before them trains."""
    random = np.random.default_rng(8)
    images = random.lognormal(0.0, sigma, (4, batch))
    images /= images.mean()
    profiles, trains = [], False
    for name, key, tokens in (("vision", "vision", IMAGE_TOKENS), ("language", language, SEQUENCE),
                              ("generator", "generator", IMAGE_TOKENS)):  # fmt: skip
        backward = 2 if name not in frozen else int(trains)
        trains = trains or name not in frozen
        weights = np.ones((1, 0)) if name == "language" else images
        profiles.append(profile_of(name, MODULES[key], tokens, backward, name in frozen, weights))
    return profiles


def profile_of(
    name: str, size: tuple[float, int, int, str], tokens: int, backward: int, frozen: bool, weights: np.ndarray
) -> ModuleProfile:
    """A module of equal layers. Parameters take 2 bytes, gradients 4, optimizer state 12."""
    parameters, layers, width, kind = size
    ways = []
    for shards, efficiency in EFFICIENCY[kind].items():
        per_layer = parameters / layers / shards
        forward_s = 2 * per_layer * tokens / (PEAK_FLOPS_PER_S * efficiency)
        kept = SAVED_VALUES * width * tokens / shards if backward else 0.0
        for recompute, again, part in (("none", 0, 1.0), ("full", 1, 2.0 / SAVED_VALUES)):
            if recompute == "full" and not backward:
                continue
            each = np.ones(layers)
            ways.append(
                ModuleVariant(
                    shards=shards,
                    recompute=recompute,
                    fixed_s=6e-5 * each,
                    sample_s=forward_s * (1 + backward + again) * each,
                    static_bytes=per_layer * (2 if frozen else 6) * each,
                    state_bytes=per_layer * (0 if frozen else 12) * each,
                    saved_bytes=kept * part * each,
                    passing_bytes=2 * width * tokens / shards * each,
                    gradient_bytes=per_layer * (0 if frozen else 4) * each,
                )
            )
    return ModuleProfile(
        name=name,
        ways=tuple(ways),
        weights=weights,
        overhead_s=4e-5,
        reduce_s_per_byte=1.0 / LINK_BYTES_PER_S,
        workspace_bytes=2.0**30,
    )


def planned(name: str, cluster: str, devices: int, batch: int, sigma: float) -> dict[str, Any]:
    """A whole plan of a built-in model. Utilisation is that of the devices' data-sheet peak."""
    from pipefit.cluster import parse_spec
    from pipefit.model.registry import open_model
    from pipefit.plan.make import make_plan
    from pipefit.plan.request.sampled_batches import SampledBatches
    from pipefit.plan.types import Job

    model, found = open_model(name), parse_spec(cluster)
    random = np.random.default_rng(8)
    images = random.lognormal(0.0, sigma, (2, batch))
    counts = np.rint(np.minimum(IMAGE_TOKENS * images / images.mean(), SEQUENCE)).astype(np.int64)
    tokens = {"patches": counts, "latents": counts}
    squares = {space: IMAGE_SIDE**2 * each for space, each in tokens.items()}
    samples = SampledBatches(tokens=tokens, squares=squares, note=f"samples: lognormal, sigma {sigma}")
    began, began_cpu = time.perf_counter(), time.process_time()
    job = Job(batch=batch, sequence=SEQUENCE, precision="bfloat16")
    plan = make_plan(model, found, job, Constraints(devices=devices), samples=samples)
    assert plan.prediction is not None
    step_s = plan.prediction.step_s
    return {
        "model": name,
        "cluster": cluster,
        "devices": devices,
        "batch": batch,
        "sigma": sigma,
        "planning_s": time.perf_counter() - began,
        "planning_processor_s": time.process_time() - began_cpu,
        "step_s": step_s,
        "lower_bound_s": plan.prediction.lower_bound_s,
        "utilisation": plan.prediction.flops_per_step / step_s / devices / PEAK_FLOPS_PER_S,
        "devices_used": len(plan.used_devices),
        "decisions": dict(plan.decisions),
        "notes": list(plan.prediction.assumptions),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """The best layout of every case; of modules replicas x stages x shards, those of a lane where they share it."""
    TABLE.print_head()
    for row in rows:
        name, best = next(iter(row["best"].items()))
        each = ", ".join(
            f"{module} {one['replicas']} x {one['stages']} x {one['shards']}" for module, one in best["modules"].items()
        )
        planning, step = format_seconds(row["planning_s"]), format_seconds(best["step_s"])
        TABLE.print_row(row["model"], row["training"], row["devices"], planning, step, f"  {name}: {each}")


if __name__ == "__main__":
    sys.exit(main())
