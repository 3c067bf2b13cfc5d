"""Tables of the pages in docs/design and docs/reference and of the ablation, from the files of benchmarks/results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import geometric_mean
from typing import Any

from benchmarks.harness import format_table, load_result, markdown_table
from benchmarks.models.published import layout_text, model_utilization
from benchmarks.models.weight_files import EQUAL
from benchmarks.schedules.table import tables as schedule_tables
from pipefit.units import format_seconds

NUMBERS = "---:"
"""The rule below columns of numbers."""


def memory_estimates_table() -> str:
    keys = (
        ("mean error", 2),
        ("largest under-estimate", 2),
        ("largest over-estimate", 2),
        ("refused although they fit", 1),
        ("refused although they fit, limits within 10 %", 1),
        ("accepted although they do not fit", 1),
        ("accepted although they do not fit, limits within 10 %", 1),
    )
    columns = (
        "estimate | mean error | under by | over by | refused, fit | close to the limit | let through | "
        "close to the limit"
    )
    rows = [
        (name, *(_spaced_percent(figures[key], digits) for key, digits in keys))
        for name, figures in load_result("memory_estimates")["figures"].items()
    ]
    return format_table(columns, rows)


def _spaced_percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def _percent(share: float, digits: int = 1) -> str:
    text = f"{share:.{digits}%}"
    return text.removeprefix("-") if float(text.rstrip("%")) == 0 else text


def placement_table() -> str:
    rows = []
    for case in load_result("placement")["cases"]:
        mean, worst = case["excess"], case["excess_worst"]
        longer = [
            f"{_percent(mean[key], 2)} ({_percent(worst[key], 2)})" if key in mean else "-"
            for key in ("ours_as_long", "ours_longer")
        ]
        others = [_percent(mean[key]) for key in ("pipette", "pipette_on_estimate", "hostname")]
        rows.append((case["name"], _percent(mean["ours"], 2), *longer, *others))
    columns = (
        "instance | ours, 1 s | ours, 10 s | ours, 60 s | Pipette's annealing, 10 s | "
        "that annealing on our estimate, 10 s | hostname order"
    )
    return format_table(columns, rows, NUMBERS)


def link_accuracy_table() -> str:
    rows = []
    for case in load_result("link_measurement")["simulated"]:
        chosen = case["chosen"]
        rounds = f"{chosen['rounds']}{' (all)' if chosen['everything_measured'] else ''}"
        plain, effects, predicted = (
            f"{_percent(figures['mean_error'])} ({_percent(figures['max_error'])}), "
            f"{_percent(figures['false_structure'])}"
            for figures in (case["tournament_mean"], case["tournament_told_apart"], chosen)
        )
        full_rounds = str(case["tournament_mean"]["rounds"])
        rows.append((case["cluster"], str(case["hosts"]), full_rounds, plain, effects, rounds, predicted))
    columns = (
        "cluster | hosts | all rounds | plain mean | with random effects | chosen rounds | "
        "with random effects and prediction"
    )
    return format_table(columns, rows)


def link_lab_table() -> str:
    rows = []
    for lab in load_result("link_measurement_lab")["lab"]:
        if lab["kind"] != "own":
            continue
        uplinks = [
            f"{len(hosts)} hosts, {out_bytes_per_s / 1e6:.1f} out, {in_bytes_per_s / 1e6:.1f} in"
            for hosts, out_bytes_per_s, in_bytes_per_s in lab["uplinks_found"]
        ]
        rows.append((
            str(lab["hosts"]),
            str(lab["rounds"]),
            f"{_percent(lab['bandwidth_mean_error'])} ({_percent(lab['bandwidth_max_error'])})",
            f"{lab['slow_port_found_bytes_per_s'] / 1e6:.2f}",
            "; ".join(uplinks) or "not found",
        ))  # fmt: skip
    return format_table("hosts | rounds | bandwidth: mean (largest) error | port of host 1, MB/s | uplink, MB/s", rows)


def layer_curves_table() -> str:
    titles = {
        "layers.0 of gpt2": "gpt2 block",
        "layers.0 of tiny": "tiny block",
        "embed of tiny": "tiny embedding",
        "head of tiny": "tiny head",
        "loss of tiny": "tiny loss",
    }
    layers = {layer["layer"]: layer for layer in load_result("compute_curves")["layers"]}
    rows = []
    for name, title in titles.items():
        layer = layers[name]
        rows.append((title, str(layer["measured_points"]), *_action_errors(layer["errors"])))
        if "with_context" in layer:
            rows.append(("slices only", "", *_action_errors(layer["with_context"])))
    return format_table("layer | points | F | I | W | B | F and B together", rows)


def _action_errors(errors: dict[str, Any]) -> list[str]:
    return [
        f"{_spaced_percent(errors[action]['mean'])} ({_spaced_percent(errors[action]['max'])})"
        for action in ("F", "I", "W", "B", "F+B")
    ]


def contention_table() -> str:
    result = load_result("contention")
    records: list[tuple[str, Sequence[Any], dict[str, Any]]] = [
        (lab["lab"], lab["plans"], lab["errors"]) for lab in result["labs"]
    ]
    records.append(("all", [plan for lab in result["labs"] for plan in lab["plans"]], result["errors"]))
    rows = []
    for name, plans, errors in records:
        cells = [
            f"{_percent(errors[key]['mean_error'])} ({_percent(errors[key]['max_error'])}) "
            f"{errors[key]['rank_correlation']:.2f}"
            for key in ("uniform", "pipette", "closed form", "without sharing", "simulator")
        ]
        rows.append((name, str(len(plans)), *cells))
    columns = "lab | plans | GPipe-like | Pipette's | our closed form | without sharing | simulator"
    return format_table(columns, rows, NUMBERS)


def simulator_speed_table() -> str:
    titles = {
        "schedule": "make the schedule",
        "lower": "lower it",
        "compile": "compile it into arrays",
        "times": "fill in the times of a cost table",
        "sweep": "the sweep over the arrays",
        "times_and_sweep": "**both: a timeline under new costs**",
        "sweep_python": "the sweep in pure Python",
        "memory": "memory curves and peaks",
    }
    seconds = load_result("simulator")["seconds"]
    return format_table(
        "step | median", [(title, f"{1e3 * seconds[key]['median']:.2f} ms") for key, title in titles.items()]
    )


def schedule_memory_table() -> str:
    families = sorted(load_result("schedule_memory")["families"].items(), key=lambda item: item[1]["share_of_1f1b"])
    rows = [
        (f"`{name}`", f"{row['share_of_1f1b']:.2f}", _spaced_percent(row["largest_error"], 2)) for name, row in families
    ]
    return format_table("family | measured, of 1F1B's | simulated less measured, worst device", rows)


def overhead_table() -> str:
    titles = {"empty": "empty", "four-layer": "four layers"}
    rows = []
    for case in load_result("runtime_overhead")["cases"]:
        times = [
            f"{case[f'{side}_us_per_action']:.0f} ({case[f'{side}_cpu_us_per_action']:.0f})"
            for side in ("ours", "torch")
        ]
        rows.append((titles[case["stages"]], str(case["processes"]), *times, f"{case['ratio_bound_95']:.2f}"))
    columns = "stages | processes | ours, us an action (CPU) | PyTorch (CPU) | ratio of step times, 95 % bound"
    return format_table(columns, rows)


def engine_peers_table() -> str:
    titles = {
        "fsdp": "ZeRO-3 | `fully_shard`",
        "tensor": "tensor parallelism | `parallelize_module`",
        "sequence": "sequence parallelism | `parallelize_module`",
        "context": "context parallelism | keys and values gathered by hand, DDP",
        "adamw": "AdamW alone | `AdamW(fused=True)`",
    }
    rows = []
    for part, cases in load_result("engine_peers")["parts"].items():
        for case in cases:
            times = (f"{1e3 * case[f'{side}_s']:.0f}" for side in ("ours", "torch"))
            peaks = (f"{max(case[f'{side}_bytes']) / 2**20:.0f}" for side in ("ours", "torch"))
            ratios = f"{case['ratio']:.2f}", f"{case['ratio_95'][1]:.2f}"
            names = titles[part].split(" | ")
            rows.append((*names, str(case["processes"]), *times, *ratios, *peaks, f"{case['bytes_ratio']:.2f}"))
    columns = (
        "pipefit | PyTorch | processes | ours, ms | PyTorch, ms | ratio | 95 % bound | "
        "ours, MiB | PyTorch, MiB | ratio of peaks"
    )
    return format_table(columns, rows)


def throughput_table() -> str:
    """Return the mean ratio of every schedule by devices and transfer, with the least and the most of its instances."""
    cases = load_result("schedule_throughput")["cases"]
    columns = sorted({(case["devices"], case["transfer_share"]) for case in cases})
    rows = []
    for name, own_class in sorted({(case["schedule"], case["own_class"]) for case in cases}):
        cells = []
        for column in columns:
            ratios = [
                case["ratio"]
                for case in cases
                if (case["schedule"], case["own_class"]) == (name, own_class)
                and (case["devices"], case["transfer_share"]) == column
            ]
            spread = f"{geometric_mean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})" if ratios else ""
            cells.append(spread)
        rows.append([f"`{name}`", own_class or "CSV", *cells])
    return markdown_table(["schedule", "PyTorch's", *map(_transfer_title, columns)], rows)


def _transfer_title(column: tuple[int, float]) -> str:
    devices, share = column
    return f"d = {devices}, transfer {share:g}"


def receive_orders_table() -> str:
    """Return the mean ratio of every schedule by transfer: by gloo's rule, and by NCCL's."""
    records = load_result("receive_orders")["rows"]
    columns = sorted({(row["devices"], row["transfer_share"]) for row in records})
    by_cell = {(row["schedule"], row["devices"], row["transfer_share"]): row for row in records}
    rows = []
    for name in dict.fromkeys(row["schedule"] for row in records):
        cells = (by_cell[name, *column] for column in columns)
        rows.append([f"`{name}`", *(f"{cell['gloo']['mean']:.3f}, {cell['nccl']['mean']:.3f}" for cell in cells)])
    return markdown_table(["schedule", *map(_transfer_title, columns)], rows)


def fit_ablation_table() -> str:
    rows = []
    for name, row in load_result("fit_ablation")["summary"].items():
        if row["takes_part"]:
            counts = (row[key] for key in ("takes_part", "won", "best_start_alone", "loses_without", "gains_without"))
            share = "" if row["share_of_cpu"] is None else f"{row['share_of_cpu']:.0%}"
            losses = (_percent(row["mean_loss"], 2), _percent(row["largest_loss"], 2))
            rows.append((name, *map(str, counts), *losses, share))
    columns = (
        "construction | takes part | won | alone | worse without | better without | mean loss | largest loss | CPU"
    )
    return format_table(columns, rows, NUMBERS)


def link_ablation_table() -> str:
    titles = {
        "hosts": "effects of hosts",
        "end": "slower end",
        "classes": "host classes",
        "classes end": "host classes and slower end",
    }
    rows = []
    for name, row in load_result("link_ablation")["summary"].items():
        counts = (row[key] for key in ("takes_part", "chosen", "worse_without", "better_without"))
        more = (f"{row['rounds']:+d}", _percent(row["largest_error_more"], 2))
        rows.append((titles.get(name, name), *map(str, counts), *more))
    columns = "model | takes part | chosen | worse without | better without | rounds more | largest error more"
    return format_table(columns, rows, NUMBERS)


def coverage_table() -> str:
    """Return the model types of `transformers` by their result."""
    types = load_result("model_coverage")["types"]
    titles = {
        "native": "family of pipefit",
        "captured": "captured from the class",
        "refused": "refused",
        "no tiny model": "not built from a configuration",
    }
    rows = []
    for state, title in titles.items():
        names = [row["model_type"] for row in types if row["state"] == state]
        shown = ", ".join(f"`{name}`" for name in names) if len(names) <= MOST_NAMED else ""
        rows.append((title, str(len(names)), shown))
    if any(row.get("weights") for row in types):
        captured = [row for row in types if row["state"] == "captured"]
        inexact = [f"`{row['model_type']}`" for row in captured if row["weights"] != EQUAL]
        shown = f"all but {', '.join(inexact)}" if inexact else ""
        rows.append(("captured, with exact weight files", str(len(captured) - len(inexact)), shown))
    return format_table("causal language models | types | which", rows)


MOST_NAMED = 30
"""Types of a result that the table names; the result file has all."""


def published_models_table() -> str:
    """Return the published models that were planned: their size, the times of opening and their plan."""
    rows = [
        (
            f"{name.partition('/')[2]} ({row['read']})",
            f"{row['parameters'] / 1e9:.1f}B",
            f"{row['open_cpu_s']:.1f} s",
            f"{row['cached_cpu_s']:.1f} s",
            f"{row['search_cpu_s']:.0f} s",
            f"{row['devices']}",
            f"{layout_text(row['decisions'])}",
            format_seconds(row["step_s"]),
            f"{model_utilization(row):.0%}",
            f"{row['peak_bytes'] / 2**30:.1f} GiB",
        )
        for name, row in load_result("published_models")["models"].items()
        if "step_s" in row
    ]
    head = "model | parameters | opened | from the cache | searched | H100 | layout | step | MFU | fullest device"
    return format_table(head, rows, NUMBERS)


DESIGN_TABLES: dict[str, Callable[[], str]] = {
    "model-coverage": coverage_table,
    "published-models": published_models_table,
    "memory-estimates": memory_estimates_table,
    "placement": placement_table,
    "link-accuracy": link_accuracy_table,
    "link-lab": link_lab_table,
    "layer-curves": layer_curves_table,
    "contention": contention_table,
    "simulator-speed": simulator_speed_table,
    "schedule-memory": schedule_memory_table,
    "overhead": overhead_table,
    "engine-peers": engine_peers_table,
    "schedules": lambda: schedule_tables(load_result("schedules")),
    "throughput": throughput_table,
    "receive-orders": receive_orders_table,
    "fit-ablation": fit_ablation_table,
    "link-ablation": link_ablation_table,
}
"""Tables by the names in the pages' marks."""
