"""Result tables of the documentation from the files of benchmarks/results, between the marks of the pages.

python -m benchmarks.tables            write the tables into the pages
python -m benchmarks.tables --check    exit code 1 if a page differs from its result files

A page marks a table with `<!-- table: NAME -->` and `<!-- end -->`; NAME is a key of TABLES.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.design_tables import DESIGN_TABLES
from benchmarks.harness import format_table, load_result
from pipefit.units import format_seconds
from pipefit.validate.published import FLOAT8, read_published
from pipefit.validate.report import GroupSummary, group_cells

ROOT = Path(__file__).resolve().parents[1]
PAGES = tuple(
    ROOT / "docs" / name
    for name in (
        "results/results.md",
        "results/validation.md",
        "results/ablation.md",
        "design/memory.md",
        "design/placement.md",
        "design/profiling.md",
        "design/simulator.md",
        "reference/models.md",
        "reference/schedules.md",
        "reference/training.md",
    )
)
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def main() -> int:
    """Write the tables, or compare them. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page differs")
    check = parser.parse_args().check
    code = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        filled = filled_page(text)
        if filled != text and check:
            print(f"{page.name} differs from its result files: python -m benchmarks.tables")
            code = 1
        elif filled != text:
            page.write_text(filled, encoding="utf-8")
    return code


def filled_page(text: str) -> str:
    """Return the page with every marked table made anew."""
    return MARKED.sub(lambda mark: f"{mark[1]}\n{TABLES[mark[2]]()}\n\n", text)


def planning_table() -> str:
    titles = {
        "8 devices, 8B": "8 devices, 8B",
        "64 devices, 70B": "64 devices, 70B",
        "1024 devices, 405B": "1,024 devices, 405B",
        "64 devices, 8B": "64 devices, 8B",
        "1024 devices, 70B": "1,024 devices, 70B",
        "64 mixed devices, 8B": "64 of two kinds, skewed links, 8B",
        "1024 mixed devices, 70B": "1,024 of two kinds, skewed links, 70B",
        "8192 mixed devices, 70B": "8,192 of two kinds, skewed links, 70B",
    }
    columns = (
        "cluster, model | search with slices, fitted orders and groups | of which groups | memory-time curve | "
        "sensitivity"
    )
    rows = []
    for name, case in load_result("planning")["cases"].items():
        search, processor, groups, trade, sensitivity = (
            f"{min(case[key]):.1f} s"
            for key in ("search_wall_s", "search_cpu_s", "with_groups_wall_s", "trade_wall_s", "sensitivity_wall_s")
        )
        rows.append((titles[name], f"{search} ({processor})", groups, trade, sensitivity))
    return format_table(columns, rows)


def joint_search_table() -> str:
    rows = []
    for row in load_result("joint_search")["rows"]:
        outcomes = Counter(pin["outcome"] for pin in row["pins"])
        best = min((pin["ratio"] for pin in row["pins"] if "ratio" in pin and row["step_s"]), default=None)
        rows.append(
            (
                row["request"],
                format_seconds(row["step_s"]) if row["step_s"] else "does not fit",
                str(outcomes["slower"] + outcomes["faster"]),
                str(outcomes["refused"] + outcomes["does not fit"]),
                "" if best is None else f"{best:.3f}",
            )
        )
    columns = "request | step of the free plan | fixed plans | refused, or nothing fits | best fixed plan over free"
    return format_table(columns, rows)


def published_table() -> str:
    titles = {
        "sc21": "Megatron-LM, SC21",
        "selene": "Megatron-LM, selective recomputation",
        "titan": "torchtitan",
        "mpt": "llm-foundry",
        "nemo": "NeMo",
        "bridge": "Megatron-Bridge",
    }
    result, rows = load_result("published"), []
    configurations = {row.name: row for row in read_published().rows}
    for family, title in titles.items():
        of_family = [row for row in result["rows"] if row["row"].startswith(f"{family}-")]
        outcomes = Counter(row["outcome"] for row in of_family)
        slow = sum(row.get("pinned_cpu_s", 0.0) > result["limit_s"] for row in of_family)
        ratios = [row["ratio"] for row in of_family if row.get("ratio")]
        errors: dict[bool, list[float]] = {True: [], False: []}
        for row in of_family:
            if row.get("pinned_s") and row["published_s"]:
                narrow = configurations[row["row"]].precision in FLOAT8
                errors[narrow].append(abs(row["pinned_s"] / row["published_s"] - 1))
        counts = (len(of_family), *(outcomes[name] for name in ("planned", "does not fit", "not expressible")), slow)
        figures = [f"{mean(errors[narrow]):.0%} ({len(errors[narrow])})" if errors[narrow] else "" for narrow in errors]
        rows.append(
            (title, *map(str, counts), str(len(ratios)), f"{max(ratios):.3f}" if ratios else "", *reversed(figures))
        )
    columns = (
        "source | rows | planned | do not fit | not expressible | take over 2 s | free plans made | "
        "slowest free plan over its fixed one | mean error of fixed steps in 16 bits (rows) | in FP8 (rows)"
    )
    return format_table(columns, rows)


def mixed_clusters_table() -> str:
    titles = {
        "half-2.5": "half of the devices 2.5 times as fast, skewed links",
        "half-1.8": "half of the devices 1.8 times as fast",
        "links-only": "links of 25 and 10 Gbit/s",
        "tight": "as the first, scarce memory",
        "half-2.5-16": "half of 16 devices 2.5 times as fast",
        "half-2.5-32": "half of 32 devices 2.5 times as fast, scarce memory",
    }
    columns = (
        "cluster | devices | even plans run | over the best on all devices | over the best of all | "
        "over the uniform formula's choice | over AMP's choice | bound of balancing alone"
    )
    rows = []
    for lab in load_result("real_clusters")["labs"]:
        gains = [lab["gains"][key] for key in ("best baseline", "best of all", "uniform", "amp")]
        figures = [f"{number:.2f}" for number in (*gains, lab["compute_bound"])]
        rows.append((titles[lab["lab"]], str(lab["devices"]), str(len(lab["plans"])), *figures))
    return format_table(columns, rows)


def spmd_table() -> str:
    titles = {"vgg19": "VGG19", "vit-b": "ViT-B", "bert-base": "BERT-Base", "bert-moe": "BERT, 128 experts"}
    columns = (
        "model | equal data parallelism | proportional | FSDP, the better | tensor in hosts, the better | ours | "
        "gain | without communication | lower bound of programs"
    )
    rows = []
    for row in load_result("spmd")["models"]:
        sides, experts = row["sides_s"], row["model"] == "bert-moe"
        equal, proportional = sides["equal data parallelism"], sides["proportional data parallelism"]
        rows.append((
            titles[row["model"]],
            f"{_milliseconds(sides['equal data parallelism with expert parallelism'])} with split experts"
            if experts else _milliseconds(equal),
            "out of memory" if proportional is None else _milliseconds(proportional),
            *(_milliseconds(min(time for name, time in sides.items() if name.startswith(start)))
              for start in ("FSDP", "tensor parallelism")),
            _milliseconds(row["ours_s"]),
            f"{row['speedup']:.2f}",
            _milliseconds(row["bound_s"]),
            "" if experts else _milliseconds(min(row["no_program_below_s"].values())),
        ))  # fmt: skip
    return format_table(columns, rows)


def _milliseconds(time_s: float) -> str:
    return f"{time_s * 1e3:,.0f}"


def shares_table() -> str:
    rows = []
    for lab in load_result("spmd_lab")["labs"]:
        ours, equal = (lab["plans"][name]["measured_s"] for name in ("ours", "equal shares"))
        rows.append((str(lab["devices"]), f"{ours:.2f}", f"{equal:.2f}", f"{lab['gain']:.2f}"))
    return format_table("devices | ours | equal shares | speed-up", rows)


def module_table(section: str) -> str:
    """Return the table of a lab of several modules: section `lab` or `few-samples`."""
    columns = (
        "sigma | training | placement | our step | predicted | the paper's kind | apart | merged | useful time | "
        "lower bound over step"
    )
    rows = []
    for row in load_result("multimodal")[section]["rows"]:
        plans, ours = row["plans"], row["plans"]["ours"]
        ratios = [
            "{:.2f} ({:.2f})".format(*(plans[name][key] / ours[key] for key in ("measured_s", "predicted_s")))
            for name in ("paper", "apart 1", "merged 1")
        ]
        rows.append((
            str(row["sigma"]), row["training"], ours["layout"]["modules"], f"{ours['measured_s']:.2f} s",
            f"{ours['predicted_s']:.2f} s", *ratios, f"{row['useful_s'] / row['devices'] / ours['measured_s']:.1%}",
            f"{ours['lower_bound_s'] / ours['measured_s']:.0%}",
        ))  # fmt: skip
    return format_table(columns, rows)


def large_clusters_table() -> str:
    rows = [
        (
            f"`{row['model']}`", f"{row['devices']:,}", row["decisions"]["modules"], f"{row['step_s']:.2f} s",
            f"{row['utilisation']:.1%}", f"{row['lower_bound_s'] / row['step_s']:.0%}",
            f"{row['planning_processor_s']:.0f} s",
        )
        for row in load_result("multimodal")["plans"]["rows"]
    ]  # fmt: skip
    return format_table("model | devices | placement | step | of the peak | lower bound over step | planning", rows)


def several_microbatches_table() -> str:
    plans = load_result("multimodal")["together"]["rows"][0]["plans"].values()
    rows = [
        (plan["layout"]["vision.multiple"], f"{plan['measured_s']:.2f} s", f"{plan['predicted_s']:.2f} s")
        for plan in plans
    ]
    return format_table("microbatches per call | step | predicted", rows)


def sample_order_table() -> str:
    result, orders = load_result("multimodal"), ("balanced", "ordered", "both")
    lab = result["arranging-lab"]["rows"][0]["ways"]
    rows = [
        ("measured", *(f"{lab[order]['measured_gain']:.2f}" for order in orders)),
        ("predicted for the lab", *(f"{lab[order]['predicted_gain']:.2f}" for order in orders)),
    ]
    for row in result["arranging"]["rows"]:
        rows.append((f"{row['rows']} a microbatch", *(f"{row['gains'][order]:.2f}" for order in orders)))
    return format_table(" | balanced | ordered | both", rows)


def uneven_parts_table() -> str:
    rows = []
    for lab in load_result("uneven_collectives")["labs"]:
        for case in lab["cases"]:
            times = [
                "{} ({})".format(*(_milliseconds(case["ways"][name][key]) for key in ("measured_s", "predicted_s")))
                for name in ("padded", "grouped", "alltoallv")
            ]
            operation = case["operation"].replace("_", "-")
            rows.append((lab["lab"], operation, " ".join(map(str, case["parts"])), *times))
    return format_table("lab | operation | parts of 48 | padded | grouped | all-to-all-v", rows)


def published_steps_table() -> str:
    """Return the errors of predictions from data sheets, by publication and model."""
    result = load_result("published_steps")
    rows = []
    for group in result["groups"]:
        chosen = [row for row in result["rows"] if row["group"] == group]
        for model in dict.fromkeys(row["model"] for row in chosen):
            errors = [row["error"] for row in chosen if row["model"] == model]
            fitted = any(row["fitted"] for row in chosen if row["model"] == model)
            left_out = result["left_out"]["models"][model]["mean_error"] if fitted else None
            rows.append(
                (
                    *(group, model, str(len(errors)), f"{mean(map(abs, errors)):.1%}", f"{mean(errors):+.1%}"),
                    "not fitted" if left_out is None else f"{left_out:.1%}",
                )
            )
        total = result["groups"][group]
        rows.append((group, "all", str(total["runs"]), f"{total['mean_error']:.1%}", "", ""))
    return format_table("publication, device | model | runs | mean error | bias | model left out (all devices)", rows)


def validation_table() -> str:
    """Return the errors of every group of published runs, from data sheets and with a calibration on three of them."""
    result = load_result("published_steps")
    rows = []
    for name, group in result["groups"].items():
        members = [row for row in result["rows"] if row["group"] == name]
        fitted = sum(row["fitted"] for row in members)
        title, runs, *figures = group_cells(name, GroupSummary(**group))
        rows.append((members[0]["set"], title, runs, str(fitted) if fitted else "none", *figures))
    columns = "set | group | runs | fitted to | mean error | bias | largest | rank correlation | calibrated on three"
    return format_table(columns, rows)


def local_runs_table() -> str:
    titles = {
        "median_s": "median step, wall clock",
        "fastest_quarter_s": "fastest quarter, wall clock",
        "with_cores_s": "median step excluding time in which a ready process had no core",
    }
    result = load_result("predictions")
    errors = {title: result["mean_error"][key] for key, title in titles.items()}
    errors["CPU time over all processes"] = result["mean_error_cpu"]
    rows = [(title, f"{error:.1%}", "") for title, error in errors.items()]
    rows[0] = (*rows[0][:2], f"{result['target']:.0%}")
    return format_table("measured quantity | mean error | target", rows)


def scarce_memory_table() -> str:
    rows = []
    for lab in load_result("real_clusters")["labs"]:
        for plan in lab["recommendations"] if len(lab["recommendations"]) > 1 else ():
            limits, peaks = ([f"{plan[key][kind] / 1e6:.2f}" for kind in ("fast", "slow")]
                             for key in ("limit_bytes", "peak_bytes"))  # fmt: skip
            rows.append((str(lab["devices"]), " and ".join(limits), " and ".join(peaks), f"{plan['measured_s']:.2f}"))
    return format_table("devices | limits (fast and slow), MB | peak of the fullest device, MB | step, s", rows)


def terapipe_table() -> str:
    columns = (
        "setting | model, data/pipeline/operation | published | predicted | slices x rows | cost of a slice | ours | "
        "ours: schedule, slices x rows | our activations, relative to its own (allowed)"
    )
    rows = []
    for row in load_result("token_slices")["replay"]["rows"]:
        theirs, ours = row["terapipe"], row["ours"]
        share = ours["activations_bytes"] / theirs["activations_bytes"]
        rows.append((
            str(row["setting"]),
            f"{row['model']}, {row['layout']}",
            f"{row['published']:.2f}",
            f"{theirs['speedup']:.2f}",
            _slices_and_rows(theirs),
            f"{row['slice_overhead_s'] * 1e3:.1f} ms",
            f"{ours['speedup']:.2f}",
            f"{ours['schedule']}, {_slices_and_rows(ours)}",
            f"{share:.2f} ({row['allowed_share']:.2f})",
        ))  # fmt: skip
    return format_table(columns, rows)


def _slices_and_rows(setting: Any) -> str:
    return f"{max(1, len(setting['slices']))} x {setting['rows']}"


def slices_lab_table() -> str:
    titles = {
        "ours": "ours: interleaved 1F1B, slices searched with it",
        "1f1b, equal cost": "slice-1F1B, slices of equal cost",
        "interleaved-1f1b, 20 equal": "interleaved 1F1B, the best uniform slicing",
        "terapipe": "TeraPipe: its slices, all forwards first",
        "interleaved-1f1b": "interleaved 1F1B without slices",
        "1f1b": "1F1B without slices",
        "gpipe": "GPipe without slices",
    }
    runs = {run["name"]: run for run in load_result("token_slices")["lab"]["two"]}
    rows = []
    for name, title in titles.items():
        run = runs[name]
        words = title if run["valid"] else f"{title} (the run is invalid)"
        rows.append((words, str(len(run["slices"])), f"{run['measured_s']:.3f} s", f"{run['speedup']:.2f}"))
    return format_table("two sequences | slices | step | speed-up over interleaved 1F1B without slices", rows)


def program_pipelines_table() -> str:
    titles = {
        "ours": "the free choice",
        "pipeline": "the best without groups",
        "program": "the best with one stage",
        "even": "groups of even shares",
    }
    plans = load_result("synthesized_stages")["labs"][0]["plans"]
    ours_s = plans["ours"]["measured_s"]
    rows = []
    for name, title in titles.items():
        plan = plans[name]
        slices = plan["decisions"].get("slices", "")
        groups = [":".join(map(str, group["shares"])) for group in plan["groups"]]
        rows.append((
            title,
            plan["decisions"]["stages"],
            str(len(slices.split(",")) if slices else 1),
            plan["decisions"]["replicas"],
            "single devices" if all(len(group["shares"]) == 1 for group in plan["groups"]) else ", ".join(groups),
            f"{plan['measured_s']:.3f} s",
            f"{plan['predicted_s']:.3f} s",
            "" if name == "ours" else f"{plan['measured_s'] / ours_s:.2f}x",
        ))  # fmt: skip
    columns = "plan | stages | slices | replicas | shares of the groups | step | predicted | speed-up of ours"
    return format_table(columns, rows)


TABLES: dict[str, Callable[[], str]] = {
    "planning": planning_table,
    "joint-search": joint_search_table,
    "published": published_table,
    "mixed-clusters": mixed_clusters_table,
    "programs": spmd_table,
    "shares": shares_table,
    "modules": lambda: module_table("lab"),
    "few-samples": lambda: module_table("few-samples"),
    "large-clusters": large_clusters_table,
    "several-microbatches": several_microbatches_table,
    "sample-order": sample_order_table,
    "uneven-parts": uneven_parts_table,
    "published-steps": published_steps_table,
    "validation": validation_table,
    "local-runs": local_runs_table,
    "scarce-memory": scarce_memory_table,
    "terapipe": terapipe_table,
    "slices-lab": slices_lab_table,
    "program-pipelines": program_pipelines_table,
    **DESIGN_TABLES,
}

if __name__ == "__main__":
    sys.exit(main())
