"""The sets of published runs: files of `data/`, as runs of the planner's own models and clusters."""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipefit.errors import FormatError, PipefitError
from pipefit.plan.request.constraints import parse_constraints
from pipefit.plan.types import Job
from pipefit.validate.published import (
    FLOAT8,
    PublishedModel,
    cluster_of,
    constraint_texts,
    equal_hosts,
    model_source,
    published_step_s,
    read_published,
    shipped_text,
    write_model,
)
from pipefit.validate.runs import MeasuredRun

MOST_DEVICES = 512
"""Devices of a run, at most."""

SETS: Mapping[str, str] = {
    "llm-foundry": "FSDP runs of MPT models, 8 to 512 devices: mosaicml/llm-foundry, Apache-2.0",
    "torchtitan": "Llama 3 in bfloat16: pytorch/torchtitan, benchmarks, BSD-3-Clause",
    "megatron": "GPT with tensor parallelism and pipelines in float16: arXiv 2104.04473 and 2205.05198",
    "gh200": "OPT-350M in float32 on 4 to 128 devices: eth-easl/sailor, MIT",
    "torchtitan-fp8": "Llama 3 in FP8: pytorch/torchtitan, benchmarks, BSD-3-Clause",
    "nemo-fp8": "recipes of NVIDIA NeMo in FP8",
    "megatron-bridge-fp8": "recipes of NVIDIA Megatron Bridge in FP8",
}
"""Name -> contents of every set."""

FITTED = ("foundry", "titan", "selene-22b", "selene-175b")
"""Beginnings of the names of the runs in 16 bits that the constants of data sheets are fitted to."""

_SET_OF_FAMILY = {
    ("sc21", False): "megatron",
    ("selene", False): "megatron",
    ("titan", False): "torchtitan",
    ("titan", True): "torchtitan-fp8",
    ("nemo", True): "nemo-fp8",
    ("bridge", True): "megatron-bridge-fp8",
}
"""(family, whether in FP8) -> set."""

_FOUNDRY_DEVICES = {"a100_40gb": "A100-40", "a100_80gb": "A100-80", "h100_80gb": "H100"}
_FOUNDRY_NETWORK = {"A100-40": "1600Gbit/s", "A100-80": "800Gbit/s", "H100": "3200Gbit/s"}
_FOUNDRY_HOST = 8
"""Devices of a host."""
_FOUNDRY_SIZES = {"760m": (24, 1536, 12), "3b": (32, 2560, 20), "13b": (40, 5120, 40), "70b": (80, 8192, 64)}
"""Layers, hidden size and heads of the MPT models of the table."""

_GH200_NETWORK = "4x200Gbit/s"
_OPT_350M = PublishedModel(source="gh200", architecture="gpt", layers=24, hidden=1024, heads=16, vocabulary=50272)
_OPT_SEQUENCE = 2048
_PROFILED_ROWS = 8
"""Rows of a microbatch whose profile the file trusts; plans with fewer are another group."""


def choose_sets(names: Collection[str]) -> tuple[str, ...]:
    """Return the names of the sets, all of them if none is named. Raises FormatError for an unknown one."""
    for name in names:
        if name not in SETS:
            raise FormatError(
                "There is no such set of runs.", where="--set", seen=name, allowed=", ".join(SETS),
                next_step="leave --set out to see all",
            )  # fmt: skip
    return tuple(name for name in SETS if not names or name in names)


def published_runs(names: Collection[str], folder: Path) -> list[MeasuredRun]:
    """Return the runs of these sets, set by set, those of a model one after the other.

    Configurations of models are written into `folder`, which must exist until the models are read.
    """
    runs = [*_configuration_runs(folder), *_foundry_runs(folder), *_gh200_runs(folder)]
    order = list(SETS)
    chosen = [run for run in runs if run.set in names]
    return sorted(chosen, key=lambda run: (order.index(run.set), run.group, run.source))


def _configuration_runs(folder: Path) -> Iterator[MeasuredRun]:
    """Yield the runs of the file of published configurations that have a step time."""
    file = read_published()
    for row in file.rows:
        step_s = published_step_s(row, file)
        narrow = row.precision in FLOAT8
        name = _SET_OF_FAMILY.get((row.family, narrow))
        if not step_s or name is None or row.devices > MOST_DEVICES or "zero3" in row.name:
            continue
        try:
            source, cluster = model_source(row, file, folder), cluster_of(row, file)
            parse_constraints(constraint_texts(row), row.batch)
        except PipefitError:
            continue
        yield MeasuredRun(
            name=row.name,
            set=name,
            group=f"{row.family} {next(iter(cluster.kinds))}{' FP8' if narrow else ''}",
            model=row.model,
            source=source,
            cluster=cluster,
            job=row.job,
            fix=constraint_texts(row),
            step_s=step_s,
            is_fitted=not narrow and row.name.startswith(FITTED),
        )


def _foundry_runs(folder: Path) -> Iterator[MeasuredRun]:
    """Yield the runs of llm-foundry: MPT models under FSDP."""
    lines = shipped_text("llm_foundry_fsdp.csv").splitlines()
    for number, entry in enumerate(csv.DictReader(line for line in lines if not line.startswith("#"))):
        devices, sequence, rows = int(entry["gpus"]), int(entry["seq"]), int(entry["mbs"])
        device = _FOUNDRY_DEVICES[entry["gpu"]]
        layers, hidden, heads = _FOUNDRY_SIZES[entry["model"]]
        sizes = PublishedModel(
            source="foundry", architecture="gpt", layers=layers, hidden=hidden, heads=heads, vocabulary=50368
        )
        batch = rows * int(entry["accum"]) * devices
        fix = (
            *(f"dp={devices}", "tp=1", "cp=1", "pp=1", f"mbs={rows}"),
            f"zero={2 if entry['sharding'] == 'SHARD_GRAD_OP' else 3}",
            f"recompute={'full' if entry['recompute'] == 'True' else 'none'}",
        )
        yield MeasuredRun(
            name=f"foundry-{entry['model']}-{devices}-{sequence}-{number}",
            set="llm-foundry",
            group=f"foundry {device}",
            model=f"mpt-{entry['model']}",
            source=write_model(f"mpt-{entry['model']}", sizes, sequence, folder),
            cluster=equal_hosts(devices // _FOUNDRY_HOST, _FOUNDRY_HOST, device, _FOUNDRY_NETWORK[device]),
            job=Job(batch=batch, sequence=sequence, precision="bfloat16"),
            fix=fix,
            step_s=batch * sequence / (float(entry["tokens_s_gpu"]) * devices),
            is_fitted=True,
        )


def _gh200_runs(folder: Path) -> Iterator[MeasuredRun]:
    """Yield the plans of OPT-350M in float32."""
    source = write_model("opt-350m", _OPT_350M, _OPT_SEQUENCE, folder)
    plans: list[dict[str, Any]] = json.loads(shipped_text("gh200_opt350m.json"))["plans"]
    for plan in plans:
        replicas, shards, stages, rows = plan["dp"][0], plan["tp"][0], plan["pp"], plan["micro_batch"]
        profiled = rows == _PROFILED_ROWS
        yield MeasuredRun(
            name=f"gh200-{plan['name']}",
            set="gh200",
            group="gh200" if profiled else "gh200, small microbatches",
            model="opt-350m",
            source=source,
            cluster=equal_hosts(plan["nodes"], plan["gpus_per_node"], "GH200", _GH200_NETWORK),
            job=Job(batch=plan["global_batch"], sequence=_OPT_SEQUENCE, precision="float32"),
            fix=(f"dp={replicas}", f"tp={shards}", f"pp={stages}", f"mbs={rows}", "cp=1", "zero=0", "recompute=none"),
            step_s=plan["measured_iteration_s"],
        )
